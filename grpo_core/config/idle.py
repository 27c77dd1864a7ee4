"""Finds keys that have no effect, because nothing in this run reads them."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs

CLUSTER = "workers of a cluster (--ray)"
WEIGHING = 'a sampler that weighs tasks (sampler.name = "mix")'
MEASURED = "validations during training (validation.every)"
"""Conditions under which a key does something, in words."""


def only_with(*names: str) -> Mapping[str, Any]:
    """Return the metadata of a key that has an effect only if one of these is there.

    Args:
        names: keys of the same table, or tables of the configuration, that differ from their defaults; or a
            condition in words.
    """
    return {"only_with": names}


WORKER_GPUS = {**only_with(CLUSTER), "instead": "name the GPUs in {}.gpus"}
"""Metadata with what to do instead of leaving out the key; ``{}`` is the name of the table."""


def idle_keys(table: Any, root: Any, there: Collection[str], where: str = "") -> Iterator[str]:
    """Yield a message for each key that is set and does nothing.

    Args:
        table: a table of the configuration, with the tables in it.
        root: the configuration.
        there: the conditions that hold, in the words of ``only_with``.
        where: the name of the table.
    """
    if isinstance(table, Mapping):
        for name, inner in table.items():
            yield from idle_keys(inner, root, there, f"{where}.{name}")
    for each in attrs.fields(type(table)) if attrs.has(type(table)) else ():
        value, key = getattr(table, each.name), f"{where}.{each.name}".removeprefix(".")
        names = each.metadata.get("only_with", ())
        read = any(name in there or _is_set(table, name) or _is_set(root, name) for name in names)
        if names and not read and _is_set(table, each.name):
            first = getattr(table, names[0], None)
            missing = (
                f"without {names[0]}" if first is None else f"with {where}.{names[0]} = {json.dumps(first)}"
            )
            instead = each.metadata.get("instead", f"leave out {each.name}").format(where)
            yield f"{key} = {json.dumps(value)} does nothing {missing}: change that, or {instead}"
        yield from idle_keys(value, root, there, key)


def _is_set(table: Any, name: str) -> bool:
    field: Any = attrs.fields_dict(type(table)).get(name)
    if field is None:
        return False
    default = field.default
    usual = default.factory() if isinstance(default, attrs.Factory) else default  # type: ignore[arg-type]
    return bool(getattr(table, name) != usual)
