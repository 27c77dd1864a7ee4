"""Writes the table of docs/new-user.md: the lines that an author writes for five tasks, by library.

    python docs/_authoring.py

It counts the files of tests/benchmarks/five_tasks, all formatted by the same program.  Empty lines and
comments do not count; docstrings do, because programs read those of tools.
"""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parent
PAGE = DOCS / "new-user.md"
FILES = DOCS.parent / "tests" / "benchmarks" / "five_tasks"
LIBRARIES = {
    "grpo-core": "ours",
    "TRL": "with_trl",
    "verifiers": "with_verifiers",
    "NeMo Gym": "with_nemo_gym",
    "SkyRL-gym": "with_skyrl_gym",
}
TASKS = {
    "exact": "one reply, one right answer",
    "game": "a game of three turns",
    "tool": "a tool",
    "judge": "a judge by a model",
    "mixed": "the first two, mixed",
}
BEGIN, END = "<!-- begin table: written by docs/_authoring.py -->\n", "<!-- end table -->"


def files(library: str, task: str) -> list[Path]:
    """The files that one of the tasks needs, beyond those of tasks that it builds on."""
    return sorted(
        path for path in (FILES / LIBRARIES[library]).iterdir() if path.stem in (task, f"{task}_data")
    )


def lines(path: Path) -> int:
    """Lines that are neither empty nor comments."""
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") for line in path.read_text().splitlines()
    )


def cell(library: str, task: str) -> str:
    found = files(library, task)
    if not found:
        return "-"
    count = sum(map(lines, found))
    return f"{count}" if len(found) == 1 else f"{count} in {len(found)} files"


def table() -> str:
    rows = [
        f"| task | {' | '.join(LIBRARIES)} |",
        f"|---|{'---|' * len(LIBRARIES)}",
        *(
            f"| {words} | {' | '.join(cell(library, task) for library in LIBRARIES)} |"
            for task, words in TASKS.items()
        ),
    ]
    return "\n".join(rows) + "\n"


def page() -> str:
    """The page with the present table."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return before + BEGIN + table() + END + rest.partition(END)[2]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
