"""Options of offers as their factories take them: paths, and small attrs values such as the ``kl`` of a loss.

A factory annotates an option as ``Path``, ``Path | None`` or a list of them.  The process of a run makes such
paths absolute when the run is made.  It does not import an environment that is offered as a string or has a
separate interpreter, since these may be loadable only in their own process.  Their annotations are read from
the text of the module.

A configuration has an attrs value as a table or as its name alone::

    [loss.options]
    kl = { coefficient = 0.01 }
    correction = { name = "token_mask", cap = 2 }

The name is the class in snake case.  Without one, the class is that of the option's default, and so are the
fields that are not given.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import pathlib
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from grpo_core.contracts.errors import ConfigError, did_you_mean
from grpo_core.plugins.offers import Factory, Selected, hint_of, signature_of

_NAMES: Mapping[str, Any] = {
    "Path": Path,
    "pathlib": pathlib,
    "Optional": typing.Optional,
    "Sequence": Sequence,
    "__builtins__": {"list": list, "tuple": tuple, "str": str},
}
"""The names in an annotation of a path."""
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
    """Return the options of a factory with an attrs value or an absolute path where its annotation says so.

    Raises ConfigError for a table that does not fit, and for an option that a table has now.
    """
    signature, hints, made = signature_of(factory), _hints(factory), dict(options)
    known = signature.parameters if signature else {}
    kinds = {name: classes_of(hint) for name, hint in hints.items()}
    if selected.kind == "loss" and (lines := _new_lines(options, kinds)):
        raise ConfigError(f"{selected}: tables have these options now; write\n{lines}")
    for name, value in options.items():
        if kinds.get(name) and not isinstance(value, (types.NoneType, *kinds[name].values())):
            made[name] = _value(f"{selected.kind}.options.{name}", value, kinds[name], known[name].default)
    return {name: _mapped(hints.get(name, Any), value, _path) for name, value in made.items()}


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


def with_absolute_paths(selected: Selected, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of an offer with absolute paths, as strings.

    Raises PluginError if an offer that is not an environment cannot be imported.
    """
    return _absolute(_hints_of(selected), options)


def with_absolute_path(selected: Selected) -> str:
    """Return the name of an offer with an absolute path, if it ends with one, as ``code:harbor:./tasks``.

    Raises PluginError if an offer that is not an environment cannot be imported.
    """
    if not selected.args or next(iter(_hints_of(selected).values()), Any) is not Path:
        return selected.name
    return selected.name.removesuffix(selected.args[0]) + absolute(selected.args[0])


def with_absolute_paths_of_file(file: Path, attribute: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Do the same for an environment in a file that is not imported here."""
    return _absolute(_read_hints(file, attribute), options)


def args_with_paths(selected: Selected, factory: Factory) -> tuple[Any, ...]:
    """Return the factory's arguments from the name of an offer, with a ``Path`` if it expects one."""
    hint = next(iter(_hints(factory).values()), Any)
    return tuple(_mapped(hint, value, _path) for value in selected.args)


def absolute(path: str | os.PathLike[str]) -> str:
    """Return the path from the root of the file system; ``~`` is the user's home."""
    return os.path.abspath(Path(path).expanduser())


def _path(path: str) -> Path:
    return Path(absolute(path))


def _absolute(hints: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _mapped(hints.get(name, Any), value, absolute) for name, value in options.items()}


def _mapped(hint: Any, value: Any, change: Callable[[str], Any]) -> Any:
    """Return the value with its paths changed; the annotation defines which parts are paths."""
    arguments = typing.get_args(hint)
    if hint is Path and isinstance(value, (str, os.PathLike)) and os.fspath(value):
        return change(os.fspath(value))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        several = [each for each in arguments if each is not type(None)]
        return _mapped(several[0], value, change) if len(several) == 1 else value
    if arguments and typing.get_origin(hint) in (list, tuple, Sequence) and isinstance(value, (list, tuple)):
        return type(value)(_mapped(arguments[0], each, change) for each in value)
    return value


def _hints_of(selected: Selected) -> dict[str, Any]:
    """Return the annotations of an offer's parameters, in order.  Raises PluginError."""
    if selected.kind == "environment" and isinstance(selected.offer.factory, str):
        module, _, attribute = selected.offer.factory.partition(":")
        try:
            spec = importlib.util.find_spec(module)  # imports only its parent packages
        except Exception:  # it can be loaded only in another process
            spec = None
        return _read_hints(Path(spec.origin) if spec and spec.origin else None, attribute)
    return _hints(selected.load())


def _hints(factory: Factory) -> dict[str, Any]:
    """Return the annotations of a factory's parameters."""
    signature = signature_of(factory)
    parameters = signature.parameters.values() if signature else ()
    return {parameter.name: hint_of(factory, parameter) for parameter in parameters}


def _read_hints(file: Path | None, attribute: str) -> dict[str, Any]:
    """Return the annotations of a factory's parameters from its module's source."""
    try:
        tree = ast.parse(file.read_bytes()) if file else ast.Module([], [])
    except (OSError, SyntaxError, ValueError):
        return {}  # importing it reports the problem
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == attribute:
            return {name: _evaluated(hint) if hint else Any for name, hint in _annotations(node).items()}
    return {}


def _annotations(node: ast.FunctionDef | ast.ClassDef) -> dict[str, ast.expr | None]:
    """Return the annotations of a function's parameters, or of a class's: its ``__init__``, or its fields."""
    if isinstance(node, ast.FunctionDef):
        parameters = [*node.args.args, *node.args.kwonlyargs]
        return {each.arg: each.annotation for each in parameters if each.arg != "self"}
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return _annotations(each)
    fields = (each for each in node.body if isinstance(each, ast.AnnAssign))
    return {each.target.id: each.annotation for each in fields if isinstance(each.target, ast.Name)}


def _evaluated(hint: ast.expr) -> Any:
    try:
        text = str(hint.value) if isinstance(hint, ast.Constant) else ast.unparse(hint)
        return eval(text, dict(_NAMES))
    except Exception:  # it consists of something else
        return Any
