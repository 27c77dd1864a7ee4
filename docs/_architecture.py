"""Writes the tables of ARCHITECTURE.md that the code knows: modules, hooks, laws, distributions.

    python docs/_architecture.py

Each table is between two comments that name it.  Nothing but the page itself is changed.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "ARCHITECTURE.md"
PACKAGE = ROOT / "grpo_core"


def modules() -> str:
    """Every module of the package, with the first sentence of its docstring; packages after modules."""
    rows = [(path.relative_to(ROOT).as_posix(), _summary(path)) for path in sorted(PACKAGE.rglob("*.py"))]
    named = [(_package_or_module(path), text) for path, text in rows if path != "grpo_core/__init__.py"]
    depth = sorted(named, key=lambda row: (row[0].count("/") > 1 or row[0].endswith("/"), row[0]))
    return _table(("where", "what it is"), [(f"`{where}`", text) for where, text in depth])


def hooks() -> str:
    """Every hook, with the first sentence of its docstring."""
    tree = ast.parse((PACKAGE / "hookspecs.py").read_text(encoding="utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    found = [node for node in functions if node.name.startswith("grpo_")]
    return _table(
        ("hook", "what it does"),
        [(f"`{node.name}({', '.join(a.arg for a in node.args.args)})`", _first(node)) for node in found],
    )


def laws() -> str:
    """Every law that ``grpo-core verify`` checks."""
    tree = ast.parse((PACKAGE / "loop" / "laws.py").read_text(encoding="utf-8"))
    for node in tree.body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == "LAWS":
            known: Mapping[str, str] = ast.literal_eval(node.value)  # type: ignore[attr-defined]
            return _table(("law", "what it says"), [(f"`{name}`", text) for name, text in known.items()])
    raise LookupError("grpo_core/loop/laws.py defines no LAWS")


def distributions() -> str:
    """Every distribution of this repository."""
    rows = []
    for path in [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]:
        project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
        where = path.parent.relative_to(ROOT).as_posix()
        rows.append((f"`{project['name']}`", f"`{where}/`" if where != "." else "", project["description"]))
    return _table(("distribution", "where", "what it is"), rows)


TABLES: Mapping[str, Callable[[], str]] = {
    "modules": modules,
    "hooks": hooks,
    "laws": laws,
    "distributions": distributions,
}


def page() -> str:
    """The page as it should be.  Raises LookupError if a table has no place in it."""
    text = PAGE.read_text(encoding="utf-8")
    for name, table in TABLES.items():
        begin, end = f"<!-- begin {name}: written by docs/_architecture.py -->", f"<!-- end {name} -->"
        if begin not in text or end not in text:
            raise LookupError(f"ARCHITECTURE.md has no place for the table {name!r}: expected {begin}")
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{table()}\n{end}{rest.partition(end)[2]}"
    return text


def _package_or_module(path: str) -> str:
    return path.removesuffix("__init__.py")


def _summary(path: Path) -> str:
    return _first(ast.parse(path.read_text(encoding="utf-8")))


def _first(node: ast.Module | ast.FunctionDef) -> str:
    """The first sentence of a docstring, as a cell of a table."""
    paragraph = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph)[0]
    return re.sub(r"``(.+?)``", r"`\1`", sentence).replace("|", "\\|")


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
