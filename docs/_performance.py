"""Writes the table of docs/performance.md from docs/performance.json.

python docs/_performance.py
python docs/_performance.py measured 15 16 --machine "2 cores, AMD EPYC"

The second command says that the figures of these rows, counted from 0, are those of the newest commit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections.abc import Iterable
from datetime import date
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
sys.path.insert(0, str(HERE))

from _blocks import filled  # noqa: E402

PAGE, ROWS = HERE / "performance.md", HERE / "performance.json"


def digest(files: Iterable[str]) -> str:
    """Return a digest of the names and contents of files and of the Python files of directories."""
    each = (path for name in files for path in (sorted((ROOT / name).rglob("*.py")) or [ROOT / name]))
    known = hashlib.sha256()
    for path in each:
        known.update(f"{path.relative_to(ROOT).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return known.hexdigest()[:16]


def measured_at(row: dict[str, str]) -> str:
    """Return the commit of a figure; ``before`` if files that it depends on have changed since."""
    changed = row["digest"] != digest(row["files"])
    return f"{'before ' if changed else ''}{row['commit']}"


def page() -> str:
    """Return the page."""
    rows = [
        f"| {row['what']} | {row['shown']} | {row['limit']} | {measured_at(row)} "
        f"| `{row['command'].removeprefix('python ')}` |"
        for row in json.loads(ROWS.read_text(encoding="utf-8"))
    ]
    head = ["| what | figure | limit | measured | command |", "|---|---|---|---|---|"]
    return filled(PAGE.read_text(encoding="utf-8"), {"table": "\n".join([*head, *rows])})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("measured", nargs="?", choices=["measured"])
    parser.add_argument("rows", nargs="*", type=int)
    parser.add_argument("--machine", default="2 cores")
    given = parser.parse_args()
    if given.measured:
        rows = json.loads(ROWS.read_text(encoding="utf-8"))
        for row in (rows[number] for number in given.rows):
            commit = subprocess.check_output(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, text=True)
            row |= {"machine": given.machine, "date": f"{date.today()}", "commit": commit.strip()}
            row["digest"] = digest(row["files"])
        ROWS.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
