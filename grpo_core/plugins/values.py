"""Options of offers as their factories take them: paths, and small attrs values such as the ``kl`` of a loss.

A factory annotates an option as ``Path``, ``Path | None`` or a list of them.  It gets an absolute path; a
relative one counts from the directory in which the run was started.

A configuration has an attrs value as a table or as its name alone::

    [loss.options]
    kl = { coefficient = 0.01 }
    correction = { name = "token_mask", cap = 2 }

The name is the class in snake case.  Without one, the class is that of the option's default, and so are the
fields that are not given.
"""

from __future__ import annotations

import os
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from grpo_core.contracts.errors import ConfigError, did_you_mean
from grpo_core.contracts.typed import wrong
from grpo_core.plugins.offers import Factory, Selected, hint_of, is_option, signature_of

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


def with_values(
    selected: Selected, factory: Factory, options: Mapping[str, Any], directory: str = ""
) -> dict[str, Any]:
    """Return the options of a factory with an attrs value or an absolute path where its annotation says so.

    Raises ConfigError for a table that does not fit, and for an option that a table has now.
    """
    signature, made = signature_of(factory), dict(options)
    known = signature.parameters if signature else {}
    kinds = {name: classes_of(hint) for name, hint in _hints(factory).items()}
    if selected.kind == "loss" and (lines := _new_lines(options, kinds)):
        raise ConfigError(f"{selected}: tables have these options now; write\n{lines}")
    for name, value in options.items():
        if kinds.get(name) and not isinstance(value, (types.NoneType, *kinds[name].values())):
            made[name] = _value(f"{selected.kind}.options.{name}", value, kinds[name], known[name].default)
    return with_paths(factory, made, directory, Path)


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


# ---------------------------------------------------------------------------------- paths


def args_with_paths(selected: Selected, factory: Factory, directory: str) -> tuple[Any, ...]:
    """Return the factory's arguments from the name of an offer, with a ``Path`` if it expects one."""
    hint = next(iter(_hints(factory).values()), Any)
    return tuple(_mapped(hint, value, directory) for value in selected.args)


def absolute(path: str | os.PathLike[str], directory: str = "") -> str:
    """Return the path from the root of the file system; ``~`` is the user's home."""
    return os.path.abspath(os.path.join(os.path.expanduser(directory), os.path.expanduser(path)))


def with_paths(factory: Factory, options: Mapping[str, Any], directory: str, kind: type) -> dict[str, Any]:
    """Return the options with absolute paths of a type, and a wrong one as the user wrote it."""
    hints = _hints(factory)
    return {name: _mapped(hints.get(name, Any), each, directory, kind) for name, each in options.items()}


def _mapped(hint: Any, value: Any, directory: str, kind: type = Path) -> Any:
    """Return the value with absolute paths; the annotation defines which parts are paths."""
    arguments = typing.get_args(hint)
    if any(wrong(value, hint, is_of=is_option)):
        return value
    if hint is Path:
        return kind(absolute(value, directory))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        several = [each for each in arguments if each is not type(None)]
        return _mapped(several[0], value, directory, kind) if len(several) == 1 else value
    if arguments and typing.get_origin(hint) in (list, tuple, Sequence) and isinstance(value, (list, tuple)):
        return type(value)(_mapped(arguments[0], each, directory, kind) for each in value)
    return value


def _hints(factory: Factory) -> dict[str, Any]:
    """Return the annotations of a factory's parameters."""
    signature = signature_of(factory)
    parameters = signature.parameters.values() if signature else ()
    return {parameter.name: hint_of(factory, parameter) for parameter in parameters}
