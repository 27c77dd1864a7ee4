"""Reads the docstrings of the keys of a configuration."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path


@functools.cache
def _documented(path: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of a module's classes (under "") and of their attributes."""
    found: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(path).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            texts = found[node.name] = {"": ast.get_docstring(node) or ""}
            for one, following in zip(node.body, node.body[1:], strict=False):
                if isinstance(one, ast.AnnAssign) and isinstance(following, ast.Expr):
                    assert isinstance(one.target, ast.Name)
                    texts[one.target.id] = " ".join(ast.literal_eval(following.value).split())
    return found


def meanings(kind: type) -> dict[str, str]:
    """Return the docstrings of a class (under "") and its attributes, including inherited ones."""
    found: dict[str, str] = {}
    for base in reversed(kind.__mro__[:-1]):
        found |= _documented(inspect.getfile(base)).get(base.__name__, {})
    return found
