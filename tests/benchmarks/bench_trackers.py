"""Measures what trackers cost a run: one that hangs, one that raises, and the ones that write its files.

    python tests/benchmarks/bench_trackers.py [STEPS]

The demo trains with and without them, by turns.  Measured is the part of a step that the event loop spends on
handing events to the threads of trackers; the two may add 1% of the step.  Their threads also share the
interpreter: the ratios of the steps' times show what that comes to.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpo_core as grpo
from grpo_core.contracts.events import Event, StepEnded
from grpo_core.reporting.trackers import Trackers

STEPS, TURNS, FIRST = 40, 3, 5
"""Steps of a run, runs of each kind, and how many steps at the start of a run do not count."""
LIMIT = 0.01


class Hanging(grpo.Tracker):
    def event(self, event: Event) -> None:
        threading.Event().wait()


class Raising(grpo.Tracker):
    def event(self, event: Event) -> None:
        raise ValueError("no network")


def trained(listeners: list[Any], steps: int) -> tuple[list[float], list[float]]:
    """Train the demo; return the seconds of each step, and those in which the loop handed events over."""
    handed, ends, parts = 0.0, [time.perf_counter()], []
    emit = Trackers.emit

    def timed(self: Trackers, event: Event) -> None:
        nonlocal handed
        begin = time.perf_counter()
        emit(self, event)
        handed += time.perf_counter() - begin
        if isinstance(event, StepEnded):
            ends.append(time.perf_counter())
            parts.append(handed)
            handed = 0.0

    Trackers.emit = timed  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as scratch:
            sections = {"trainer": {"steps": steps}, "validation": {"every": 0}, "checkpoint": {"every": 0}}
            grpo.train(sections, env="math:sort", output=Path(scratch) / "run", listeners=listeners)
    finally:
        Trackers.emit = emit  # type: ignore[method-assign]
    seconds = [after - before for before, after in pairwise(ends)]
    return seconds[FIRST:], parts[FIRST:]


def main(steps: int) -> int:
    kinds: dict[str, list[Any]] = {"without": [], "with": [Hanging(), Raising()]}
    seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
    parts: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(TURNS):
        for kind, listeners in kinds.items():
            took, handed = trained(listeners, steps)
            seconds[kind].append(statistics.median(took))
            parts[kind] += [part / whole for part, whole in zip(handed, took, strict=True)]
    for kind in kinds:
        print(
            f"{kind:8} step {1e3 * statistics.median(seconds[kind]):6.1f} ms, "
            f"handing events over {statistics.median(parts[kind]):.3%}, at most {max(parts[kind]):.3%}"
        )
    ratios = [b / a for a, b in zip(seconds["without"], seconds["with"], strict=True)]
    print("steps with them, of those without:", ", ".join(f"{ratio:.3f}" for ratio in ratios))
    added = statistics.median(parts["with"]) - statistics.median(parts["without"])
    print(f"they add {added:.3%} of a step (limit {LIMIT:.0%})")
    return int(added > LIMIT)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else STEPS))
