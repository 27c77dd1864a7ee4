"""Names of a package that are loaded from their modules on first use."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
from collections.abc import Callable
from typing import Any


def attach(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Make the functions ``__getattr__`` and ``__dir__`` and the list ``__all__`` of a package.

    Its names are its imports below ``if TYPE_CHECKING``, so that they are written once.

    Args:
        package: its ``__name__``.
    """
    home_of = {
        alias.asname: str(statement.module)
        for block in ast.parse(inspect.getsource(sys.modules[package])).body
        if isinstance(block, ast.If)
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if alias.asname
    }

    def load(name: str) -> Any:
        if name not in home_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = home_of[name]
        if home == package:
            return importlib.import_module(f"{package}.{name}")
        module = importlib.import_module(home)
        value = getattr(module, name) if hasattr(module, name) else importlib.import_module(f"{home}.{name}")
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *home_of})

    return load, names, sorted(home_of)
