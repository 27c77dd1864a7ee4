"""Structural edits of Python source code: one expression, or a run of statements, inside one function.

Layout, comments and quotes of the source do not matter, since both sides are compared as syntax trees.
"""

from __future__ import annotations

import ast
import copy
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import frozen

FUNCTION = ast.FunctionDef | ast.AsyncFunctionDef
IGNORED = {"ctx", "kind", "type_comment", "type_params"}
"""Fields of syntax nodes that say nothing about the meaning of a snippet."""


class EditError(Exception):
    """An edit does not apply to the source exactly once."""


def edited(source: str, edits: Sequence[Mapping[str, str]]) -> str:
    """Return the source with every edit made, unparsed.

    Each edit has ``function`` (a qualified name, as ``Buffer.fail``), ``old`` and ``new``.  If both are
    expressions, one expression is replaced; otherwise a run of statements, and an empty ``new`` deletes it.
    In ``old``, ``...`` stands for any expression, for any arguments of a call, or for any block; the
    same ``...`` in ``new`` stands for what it was, in the order of appearance.

    Raises EditError if there is no such function, or if ``old`` is not in it exactly once.
    """
    tree = ast.parse(source)
    for edit in edits:
        _edit(_function(tree, edit["function"]), edit["function"], edit["old"], edit["new"])
    return ast.unparse(ast.fix_missing_locations(tree))


@frozen
class _Place:
    """Nodes that ``old`` matches: the value of a field, or a part of the list that is its value."""

    owner: ast.AST
    field: str
    part: slice | None
    held: list[Any]
    """The source that each ``...`` stands for, in the order of appearance."""


@frozen
class _Arguments:
    """The arguments that ``...`` stands for in ``f(...)``."""

    args: list[ast.expr]
    keywords: list[ast.keyword]


def _edit(function: ast.AST, name: str, old: str, new: str) -> None:
    old_body, new_body = (ast.parse(textwrap.dedent(text)).body for text in (old, new))
    before, after = _only_expression(old_body), _only_expression(new_body)
    replacement: Sequence[ast.AST]
    if before is not None and after is not None:
        places, replacement = list(_expressions(function, before)), [after]
    else:
        places, replacement = list(_statements(function, old_body)), new_body
    if len(places) != 1:
        raise EditError(f"it occurs {len(places)} times in {name}, expected once:\n{old.strip()}")
    _replace(places[0], [_filled(node, places[0].held) for node in replacement])


def _function(tree: ast.AST, name: str) -> ast.AST:
    scope = tree
    for part in name.split("."):
        found = [
            node
            for node in _within_scope(scope)
            if isinstance(node, FUNCTION | ast.ClassDef) and node.name == part
        ]
        if len(found) != 1:
            raise EditError(f"there are {len(found)} functions {name!r} (at {part!r}), expected one")
        (scope,) = found
    return scope


def _within_scope(scope: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(child, FUNCTION | ast.ClassDef | ast.Lambda):
            yield from _within_scope(child)


def _only_expression(body: list[ast.stmt]) -> ast.expr | None:
    return body[0].value if len(body) == 1 and isinstance(body[0], ast.Expr) else None


def _expressions(function: ast.AST, wanted: ast.expr) -> Iterator[_Place]:
    for owner in ast.walk(function):
        for field, value in ast.iter_fields(owner):
            for i, node in enumerate(value if isinstance(value, list) else [value]):
                held: list[Any] = []
                if isinstance(node, ast.expr) and _same(wanted, node, held):
                    yield _Place(owner, field, slice(i, i + 1) if isinstance(value, list) else None, held)


def _statements(function: ast.AST, wanted: list[ast.stmt]) -> Iterator[_Place]:
    for owner in ast.walk(function):
        for field, value in ast.iter_fields(owner):
            if isinstance(value, list) and value and isinstance(value[0], ast.stmt):
                for begin in range(len(value) - len(wanted) + 1):
                    held: list[Any] = []
                    part = slice(begin, begin + len(wanted))
                    if all(_same(a, b, held) for a, b in zip(wanted, value[part], strict=True)):
                        yield _Place(owner, field, part, held)


def _same(wanted: Any, node: Any, held: list[Any]) -> bool:
    """Compare two syntax trees; append to ``held`` what the second has for each ``...`` of the first."""
    if isinstance(wanted, list):
        if _is_hole(wanted):
            held.append(node)
            return isinstance(node, list)
        return (
            isinstance(node, list)
            and len(wanted) == len(node)
            and all(_same(a, b, held) for a, b in zip(wanted, node, strict=True))
        )
    if not isinstance(wanted, ast.AST):
        return type(wanted) is type(node) and wanted == node
    if _is_ellipsis(wanted):
        held.append(node)
        return isinstance(node, ast.expr)
    if isinstance(wanted, ast.Call) and isinstance(node, ast.Call) and _takes_any_arguments(wanted):
        held.append(_Arguments(node.args, node.keywords))
        return _same(wanted.func, node.func, held)
    if type(wanted) is not type(node):
        return False
    return all(
        _same(value, getattr(node, field, None), held)
        for field, value in ast.iter_fields(wanted)
        if field not in IGNORED
    )


def _is_ellipsis(node: Any) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _takes_any_arguments(call: ast.Call) -> bool:
    return not call.keywords and _is_hole(call.args)


def _is_hole(nodes: list[Any]) -> bool:
    """Tell whether a block, or the arguments of a call, are ``...`` and nothing else."""
    if len(nodes) != 1:
        return False
    (node,) = nodes
    return _is_ellipsis(node.value if isinstance(node, ast.Expr) else node)


def _filled(node: Any, held: list[Any]) -> Any:
    """Put what was held in the place of each ``...``."""
    if isinstance(node, list):
        if _is_hole(node) and held and isinstance(held[0], list):
            return held.pop(0)
        return [_filled(item, held) for item in node]
    if not isinstance(node, ast.AST):
        return node
    if _is_ellipsis(node) and held:
        return held.pop(0)
    if isinstance(node, ast.Call) and _is_hole(node.args) and held and isinstance(held[0], _Arguments):
        arguments = held.pop(0)
        return ast.Call(func=_filled(node.func, held), args=arguments.args, keywords=arguments.keywords)
    filled = copy.copy(node)
    for field, value in ast.iter_fields(node):
        setattr(filled, field, _filled(value, held))
    return filled


def _replace(place: _Place, nodes: list[Any]) -> None:
    if place.part is None:
        setattr(place.owner, place.field, nodes[0])
        return
    siblings = getattr(place.owner, place.field)
    in_block = isinstance(siblings[0], ast.stmt)
    siblings[place.part] = nodes
    if in_block and not siblings and place.field == "body":
        siblings.append(ast.Pass())
