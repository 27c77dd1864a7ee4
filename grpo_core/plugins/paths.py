"""Options of plugins that are paths: a factory annotates them as ``Path``, ``Path | None`` or a list of them.

The process of a run makes them absolute when the run is made.  It does not import an environment that is
offered as a string or has a separate interpreter, since these may be loadable only in their own process.
Their annotations are read from the text of the module.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import pathlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_core.plugins.offers import Factory, Selected, hint_of, signature_of

_NAMES: Mapping[str, Any] = {
    "Path": Path,
    "pathlib": pathlib,
    "Optional": typing.Optional,
    "Sequence": Sequence,
    "__builtins__": {"list": list, "tuple": tuple, "str": str},
}
"""The names in an annotation of a path."""


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


def with_paths(factory: Factory, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a factory with an absolute ``Path`` wherever it expects one."""
    hints = _hints(factory)
    return {name: _mapped(hints.get(name, Any), value, _path) for name, value in options.items()}


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
    if hint is Path and isinstance(value, (str, os.PathLike)):
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
