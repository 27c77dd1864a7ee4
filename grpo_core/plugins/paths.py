"""Options of plugins that are paths: a factory annotates them as ``Path``, ``Path | None`` or a list of them.

It gets an absolute path; a relative one counts from the directory in which the run was started.
"""

from __future__ import annotations

import os
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_core.plugins.offers import Factory, Selected, hint_of, signature_of


def with_paths(factory: Factory, options: Mapping[str, Any], directory: str) -> dict[str, Any]:
    """Return the options of a factory with an absolute ``Path`` wherever it expects one."""
    hints = _hints(factory)
    return {name: _mapped(hints.get(name, Any), value, directory) for name, value in options.items()}


def args_with_paths(selected: Selected, factory: Factory, directory: str) -> tuple[Any, ...]:
    """Return the factory's arguments from the name of an offer, with a ``Path`` if it expects one."""
    hint = next(iter(_hints(factory).values()), Any)
    return tuple(_mapped(hint, value, directory) for value in selected.args)


def absolute(path: str | os.PathLike[str], directory: str = "") -> str:
    """Return the path from the root of the file system; ``~`` is the user's home."""
    return os.path.abspath(Path(directory, Path(path).expanduser()))


def _mapped(hint: Any, value: Any, directory: str) -> Any:
    """Return the value with absolute paths; the annotation defines which parts are paths."""
    arguments = typing.get_args(hint)
    if hint is Path and isinstance(value, (str, os.PathLike)):
        return Path(absolute(value, directory))
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        several = [each for each in arguments if each is not type(None)]
        return _mapped(several[0], value, directory) if len(several) == 1 else value
    if arguments and typing.get_origin(hint) in (list, tuple, Sequence) and isinstance(value, (list, tuple)):
        return type(value)(_mapped(arguments[0], each, directory) for each in value)
    return value


def _hints(factory: Factory) -> dict[str, Any]:
    """Return the annotations of a factory's parameters."""
    signature = signature_of(factory)
    parameters = signature.parameters.values() if signature else ()
    return {parameter.name: hint_of(factory, parameter) for parameter in parameters}
