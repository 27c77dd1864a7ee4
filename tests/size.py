"""Counts the lines of code of each distribution and room, without blank lines, comments and docstrings.

python tests/size.py        # a table, with the share of private functions that have one caller
"""

from __future__ import annotations

import ast
import functools
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILT_IN = ("demo", "diagnosis", "engines/local", "losses", "training", "weights")
"""Rooms of the parts that the core reaches by hooks."""
LATER = ("grpo-plugin-openai", "grpo-plugin-smollm2", "grpo-plugin-tinker")
"""Plugins with rows of their own: they are new, and no part of what shrinks."""
IGNORED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.ENCODING,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    """Number of lines with code: blank lines, comments and statements that are one string do not count."""
    lines: set[int] = set()
    begins = True
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.NEWLINE:
                begins = True
            elif token.type not in IGNORED:
                if not (begins and token.type == tokenize.STRING):
                    lines.update(range(token.start[0], token.end[0] + 1))
                begins = False
    return len(lines)


def room_of(path: Path) -> str:
    """Row of the table that a file belongs to: a room of the core, or a distribution."""
    parts = path.relative_to(ROOT).parts
    if parts[0] == "plugins":
        return parts[1]
    if parts[1:3] == ("engines", "local"):
        return "grpo_core/engines/local"
    return f"grpo_core/{parts[1]}" if len(parts) > 2 else "grpo_core"


@functools.cache
def counted() -> Counter[str]:
    """Lines of code by room and distribution, tests excluded."""
    return Counter({room: sum(map(code_lines, files)) for room, files in _files().items()})


def sums(rooms: Counter[str]) -> dict[str, int]:
    """The sums that may only go down, and the rows of plugins that are new."""
    built_in = {f"grpo_core/{room}" for room in BUILT_IN}
    ours = {room: lines for room, lines in rooms.items() if room not in LATER}
    core = {room: lines for room, lines in ours.items() if room.split("/")[0] == "grpo_core"}
    return {
        "core": sum(lines for room, lines in core.items() if room not in built_in),
        "built-in": sum(lines for room, lines in core.items() if room in built_in),
        "all distributions": sum(ours.values()),
        **{room: rooms[room] for room in LATER if room in rooms},
    }


def one_caller() -> tuple[int, int]:
    """Number of private functions that their module mentions once, and of all functions."""
    once = functions = 0
    for path in (path for files in _files().values() for path in files):
        tree = ast.parse(path.read_text())
        used: Counter[str] = Counter()
        defined = []
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                defined.append(node.name)
            elif isinstance(node, ast.Name):
                used[node.id] += 1
            elif isinstance(node, ast.Attribute):
                used[node.attr] += 1
        functions += len(defined)
        once += sum(name.startswith("_") and not name.endswith("__") and used[name] == 1 for name in defined)
    return once, functions


def _files() -> dict[str, list[Path]]:
    rooms: dict[str, list[Path]] = {}
    for path in sorted([*ROOT.glob("grpo_core/**/*.py"), *ROOT.glob("plugins/*/grpo_plugin_*/**/*.py")]):
        rooms.setdefault(room_of(path), []).append(path)
    return rooms


def table() -> str:
    """The counts as text."""
    rooms = counted()
    rows = [*sorted(rooms.items(), key=lambda row: (-row[1], row[0])), ("", 0), *sums(rooms).items()]
    once, functions = one_caller()
    lines = [f"{name:<36}{lines:>7,}" if name else "" for name, lines in rows]
    return "\n".join(
        [*lines, f"private functions with one caller: {once} of {functions}, {once / functions:.0%}"]
    )


if __name__ == "__main__":
    print(table())
