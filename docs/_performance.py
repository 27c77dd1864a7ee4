"""Writes the table of docs/performance.md from docs/performance.json.

python docs/_performance.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from _blocks import filled  # noqa: E402

PAGE = HERE / "performance.md"


def page() -> str:
    """Return the page."""
    rows = [
        f"| {row['what']} | {row['shown']} | {row['limit']} | `{row['command']}` |"
        for row in json.loads((HERE / "performance.json").read_text(encoding="utf-8"))
    ]
    head = ["| what | figure | limit | command |", "|---|---|---|---|"]
    return filled(PAGE.read_text(encoding="utf-8"), {"table": "\n".join([*head, *rows])})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
