"""Writes the table of trained models in docs/samplers.md from docs/selection.json.

    python docs/_selection.py

The numbers are those of tests/benchmarks/bench_selection.py.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS), str(DOCS.parent / "tests" / "benchmarks")]
from _blocks import filled  # noqa: E402 - it lies beside this file
from bench_selection import TASKS, middle, settings, summary  # noqa: E402 - it is not a package

NUMBERS, PAGE = DOCS / "selection.json", DOCS / "samplers.md"
ARMS = ("uniform", "dynamic", "learnable")
NAMES = {
    "spread": "of all difficulties",
    "mostly solved": "most of them solved",
    "mostly hopeless": "most of them hopeless",
}


def table(runs: Mapping[str, Any]) -> str:
    """Return the rollouts to the target: one row for each task."""
    lines = [
        "| prompts, target, seeds | rollouts to the target, uniform | dynamic sampling | `learnable_prompts` "
        "| of uniform | of dynamic |",
        "|---|---|---|---|---|---|",
    ]
    for name, task in TASKS.items():
        arms = summary(runs, name)
        if not (seeds := arms["uniform"]["seeds"]):
            continue
        middles = [middle(arms[arm]["rollouts"], task.rollouts) for arm in ARMS]
        shown = " | ".join(_cell(n, arms[arm]["rollouts"]) for arm, n in zip(ARMS, middles, strict=True))
        ratios = " | ".join(f"{middles[2] / n:.2f}" for n in middles[:2])
        lines.append(f"| {NAMES[name]}, {task.target:.0%}, {len(seeds)} | {shown} | {ratios} |")
    return "\n".join(lines)


def finals(runs: Mapping[str, Any]) -> str:
    """Return the accuracies after the same number of rollouts: one row for each task."""
    lines = [
        "| prompts | rollouts | accuracy, uniform | dynamic sampling | `learnable_prompts` |",
        "|---|---|---|---|---|",
    ]
    for name, task in TASKS.items():
        arms = summary(runs, name)
        if not arms["uniform"]["seeds"]:
            continue
        shown = " | ".join(f"{fmean(arms[arm]['final']):.1%}" for arm in ARMS)
        lines.append(f"| {NAMES[name]} | {task.rollouts:,} | {shown} |")
    return "\n".join(lines)


def _cell(n: float, rollouts: Sequence[float | None]) -> str:
    """Return the median, and how many runs never reached the target."""
    missed = rollouts.count(None)
    return f"{n:,.0f}" + (f" ({missed} never)" if missed else "")


def page() -> str:
    """Return the page with the present numbers."""
    numbers = json.loads(NUMBERS.read_text())
    if numbers["settings"] != settings():
        raise SystemExit(f"{NUMBERS.name} has the numbers of other settings: run bench_selection.py again")
    parts = {"trained": table(numbers["runs"]), "finals": finals(numbers["runs"])}
    return filled(PAGE.read_text(encoding="utf-8"), parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
