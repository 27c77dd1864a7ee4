"""Loads a Python object by its name, for plugins that take functions and classes of users."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from grpo_core.errors import ConfigError, did_you_mean


def load_object(name: str, *, who: str) -> Any:
    """Return what ``module:attribute`` or ``path/file.py:attribute`` names.

    Modules are those that are installed, and those of the working directory.

    Args:
        name: the name.
        who: name of the plugin that asks, for messages.

    Raises ConfigError.
    """
    home, separator, attribute = name.rpartition(":")
    if not separator or not home or not attribute:
        raise ConfigError(f"{who}: {name!r} is no name; write {who}:MODULE:NAME or {who}:./file.py:NAME")
    try:
        module = _file(Path(home).expanduser().resolve()) if home.endswith(".py") else _module(home)
        found = module
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError:
        known = {each for each in vars(module) if not each.startswith("_")}
        raise ConfigError(f"{who}: {home} has no {attribute!r}.{did_you_mean(attribute, known)}") from None
    except Exception as error:
        raise ConfigError(f"{who}: {home} cannot be imported: {type(error).__name__}: {error}") from error
    return found


def _module(name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:  # last, so nothing is hidden
        sys.path.append(str(Path.cwd()))
    return importlib.import_module(name)


def _file(path: Path) -> Any:
    name = "grpo_file_" + "".join(c if c.isalnum() else "_" for c in str(path))
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise FileNotFoundError(f"there is no such file: {path}")
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
