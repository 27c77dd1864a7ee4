"""Objects by name, and the package of modules that are imported from single files.

The name of such a module contains the path of its file, so a process that ``multiprocessing`` starts by spawn
or forkserver finds the functions of the file as it finds those of an installed package: to import the module
it imports this one first.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import sys
from collections.abc import Sequence
from contextvars import ContextVar
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from grpo_core.contracts.errors import ConfigError, PluginError, did_you_mean, with_place

__path__: list[str] = []
FILE_PREFIX = f"{__name__}."
"""Prefix of the name of a module that is imported from a single file."""
importing_file: ContextVar[Path | None] = ContextVar("the file that is being imported", default=None)


def module_name(path: Path) -> str:
    """Return the name of a file's module; two files never share one."""
    return FILE_PREFIX + re.sub(r"[^A-Za-z0-9]", lambda found: f"_{ord(found[0]):x}_", str(path))


class _Finder:
    """Finds the module of a name by the path in it."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(FILE_PREFIX):
            return None
        coded = name.removeprefix(FILE_PREFIX)
        file = Path(re.sub(r"_([0-9a-f]+)_", lambda found: chr(int(found[1], 16)), coded))
        return spec_from_file_location(name, file) if file.is_file() else None


sys.meta_path.append(_Finder)


def in_file(name: str) -> tuple[Path, str] | None:
    """Split the name of an offer that is in a file, ``PATH.py`` or ``PATH.py:NAME``; None for any other.

    After a word and a colon, as in ``agent:./file.py``, the path belongs to the plugin or prefix of that
    name.
    """
    if re.match(r"\w+:", name) or (match := re.fullmatch(r"(.+\.py)(?::(.*))?", name)) is None:
        return None
    return Path(os.path.expanduser(match[1])), match[2] or ""


def import_file(path: Path) -> Any:
    """Import a file that is not installed, also again.

    Its directory is appended to the module search path: the file finds modules next to it,
    and nothing there can hide a module of the standard library or of an installed package.
    """
    if not path.is_file():
        raise PluginError(f"there is no file {path}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    name = module_name(path)
    sys.modules.pop(name, None)
    importing = importing_file.set(path)
    try:
        return importlib.import_module(name)
    finally:
        importing_file.reset(importing)


def load_object(name: str, *, who: str) -> Any:
    """Return the object that ``module:attribute`` or ``path/file.py:attribute`` names.

    Modules may be installed or in the working directory.

    Args:
        name: the name.
        who: name of the calling plugin, for messages.

    Raises ConfigError.
    """
    home, separator, attribute = name.rpartition(":")
    if not separator or not home or not attribute:
        raise ConfigError(f"{who}: {name!r} is not a name; write {who}:MODULE:NAME or {who}:./file.py:NAME")
    try:
        module = _file(Path(os.path.expanduser(home)).resolve()) if home.endswith(".py") else _module(home)
    except Exception as error:
        raise ConfigError(f"{who}: {home} cannot be imported: {with_place(error)}") from error
    found = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            known = {each for each in vars(module) if not each.startswith("_")}
            raise ConfigError(f"{who}: {home} has no {attribute!r}.{did_you_mean(attribute, known)}")
        found = getattr(found, part)
    return found


def _module(name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:  # last, so nothing is hidden
        sys.path.append(str(Path.cwd()))
    return importlib.import_module(name)


_file = functools.cache(import_file)
