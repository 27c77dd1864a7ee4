"""Names of a package that are loaded from their modules on first use."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any


def attach(
    package: str, homes: Mapping[str, Sequence[str]], *, renamed: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """The functions ``__getattr__`` and ``__dir__`` and the list ``__all__`` of a package.

    Args:
        package: its ``__name__``.
        homes: the names that come from each module; those of the package itself are its submodules.
        renamed: deprecated names with those that replace them; their use gives a DeprecationWarning.
    """
    home_of = {name: home for home, names in homes.items() for name in names}

    def load(name: str) -> Any:
        if (new := renamed.get(name)) is not None:
            message = f"{package}.{name} is deprecated and will be removed; use {package}.{new}"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
            return getattr(sys.modules[package], new)
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = home_of[name]
        if home == package:
            return importlib.import_module(f"{package}.{name}")
        value = getattr(importlib.import_module(home), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return load, names, sorted(home_of)
