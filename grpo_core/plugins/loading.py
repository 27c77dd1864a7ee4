"""Loads a Python object by its name, for plugins that accept users' functions and classes."""

from __future__ import annotations

import functools
import importlib
import sys
from pathlib import Path
from typing import Any

from grpo_core.contracts.errors import ConfigError, did_you_mean, with_place
from grpo_core.plugins.installed import import_file


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
        module = _file(Path(home).expanduser().resolve()) if home.endswith(".py") else _module(home)
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


@functools.cache
def _file(path: Path) -> Any:
    return import_file(path)
