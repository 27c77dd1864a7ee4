"""Options of offers that are small attrs values, such as the ``kl`` of a loss.

A configuration has such a value as a table or as its name alone::

    [loss.options]
    kl = { coefficient = 0.01 }
    correction = { name = "token_mask", cap = 2 }

The name is the class in snake case.  Without one, the class is that of the option's default, and so are the
fields that are not given.
"""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Mapping
from typing import Any

import attrs

from grpo_core.contracts.errors import ConfigError, did_you_mean
from grpo_core.plugins.offers import Factory, Selected, hint_of, signature_of

MOVED = {
    "importance_floor": "correction.floor",
    "importance_cap": "correction.cap",
    "kl_in": "kl.acts_on",
    "teacher_in": "teacher.acts_on",
    "reward_coefficient": "teacher.reward_coefficient",
    "off_policy_limit": "mask.off_policy_limit",
    "top_entropy": "mask.top_entropy",
}
"""Old options of losses, and where they are now; the first part of another one is its table."""


def with_values(selected: Selected, factory: Factory, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a factory with an attrs value wherever its annotation expects one.

    Raises ConfigError for a table that does not fit, and for an option that a table has now.
    """
    signature, made = signature_of(factory), dict(options)
    known = signature.parameters if signature else {}
    kinds = {name: classes_of(hint_of(factory, each)) for name, each in known.items()}
    if selected.kind == "loss" and (lines := _new_lines(options, kinds)):
        raise ConfigError(f"{selected}: tables have these options now; write\n{lines}")
    for name, value in options.items():
        if kinds.get(name) and not isinstance(value, (types.NoneType, *kinds[name].values())):
            made[name] = _value(f"{selected.kind}.options.{name}", value, kinds[name], known[name].default)
    return made


def classes_of(hint: Any) -> dict[str, type[Any]]:
    """Return the attrs classes of an annotation by their names, such as "token_mask"."""
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    kinds = [each for each in (typing.get_args(hint) if union else (hint,)) if isinstance(each, type)]
    return {re.sub("(?<!^)(?=[A-Z])", "_", kind.__name__).lower(): kind for kind in kinds if attrs.has(kind)}


def _value(where: str, value: Any, kinds: Mapping[str, type[Any]], default: Any) -> Any:
    from grpo_core.config.reading import structured  # environments run where it cannot be imported

    table = {"name": value} if isinstance(value, str) else value
    usual = next((name for name, kind in kinds.items() if kind is type(default)), next(iter(kinds)))
    chosen = str(table.get("name", usual)) if isinstance(table, Mapping) else ""
    if chosen not in kinds:
        names = " or ".join(kinds) + "." + did_you_mean(chosen, set(kinds))
        raise ConfigError(f"configuration key {where!r} is {value!r}; expected a table or {names}")
    same = attrs.asdict(default, recurse=False) if type(default) is kinds[chosen] else {}
    given = {key: each for key, each in {**same, **table}.items() if key != "name"}
    return structured(kinds[chosen], given, where=where)


def _new_lines(options: Mapping[str, Any], kinds: Mapping[str, Any]) -> str:
    """Return the lines that replace a loss's old options, or "" if there are none."""
    from grpo_core.config.reading import lines_of

    tables: dict[str, dict[str, Any]] = {}
    for old in (each for each in options if each not in kinds):
        table, _, key = MOVED.get(old, old.replace("_", ".", 1)).partition(".")
        if kinds.get(table):
            tables.setdefault(table, {})[key] = options[old]
    if "correction" in tables and isinstance(options.get("correction"), str):
        tables["correction"]["name"] = options["correction"]
    return lines_of("loss.options", tables) if tables else ""
