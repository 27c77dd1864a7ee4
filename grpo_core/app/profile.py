"""Where the time of some steps went, in every process of a run: what ``train --profile N`` prints."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from grpo_core.events import Event, StepEnded
from grpo_core.processes.child import living
from grpo_core.protocols import Tracker
from grpo_core.training.setup import PROFILED_AFTER, steps_of_profile

MAIN = "main"
TABLE = "profile.txt"


def cpu_seconds() -> dict[str, float]:
    """Return the seconds that this process and its children have computed, with all of their threads.

    Processes of one name count together.  Empty where the system does not tell, as on macOS.
    """
    found: dict[str, float] = {}
    groups = living()
    tick = os.sysconf("SC_CLK_TCK")
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        name = MAIN if entry.name == str(os.getpid()) else groups.get(int(fields[2]))
        if name is not None:
            spent = (int(fields[11]) + int(fields[12])) / tick
            found[name] = found.get(name, 0.0) + spent
    return found


class ProfileTracker(Tracker):
    """Measures the steps of a profile, and writes their table when they are over.

    Args:
        directory: of the run's profile.
        steps: number of steps.
        cpu: returns the seconds that each process has computed.
    """

    def __init__(
        self, directory: Path, steps: int, cpu: Callable[[], Mapping[str, float]] = cpu_seconds
    ) -> None:
        self._directory, self._steps, self._cpu = directory, steps, cpu
        self._seen = 0
        self._begin: Mapping[str, float] = {}
        self._end: Mapping[str, float] = {}
        self._spent: Counter[str] = Counter()

    def event(self, event: Event) -> None:
        """Add up what a step of the profile took."""
        if not isinstance(event, StepEnded):
            return
        self._seen += 1
        traced, last = steps_of_profile(self._steps)
        if self._seen == PROFILED_AFTER:
            self._begin = self._cpu()
        elif PROFILED_AFTER < self._seen < traced:
            self._spent.update({name: event.metrics.get(name, 0.0) for name in SPENT})
            if self._seen == traced - 1:
                self._end = self._cpu()
        elif self._seen == last:
            self._write()

    def _write(self) -> None:
        computed = {name: max(0.0, end - self._begin.get(name, 0.0)) for name, end in self._end.items()}
        self._directory.mkdir(parents=True, exist_ok=True)
        text = table(self._steps, self._spent, computed, _read(self._directory / "trainer.json"))
        (self._directory / TABLE).write_text(text)


SPENT = ("time/step", "time/wait_for_groups", "time/generate", "time/train")
"""Metrics of a step that are seconds."""


def table(
    steps: int, spent: Mapping[str, float], computed: Mapping[str, float], trainer: Mapping[str, Any]
) -> str:
    """Write where the time went: a line for each process, and the parts of the trainer's.

    Args:
        spent: seconds of all steps, by metric.
        computed: seconds that each process computed on CPUs.
        trainer: what the trainer wrote about its trace; empty without one.
    """
    whole = spent["time/step"]
    did = {
        MAIN: f"waited {_share(spent['time/wait_for_groups'], whole)} for groups to train",
        "trainer": f"trained {_share(spent['time/train'], whole)}",
        "engine": f"generated {_share(spent['time/generate'], whole)}, environments included",
    }
    counted = "1 step" if steps == 1 else f"{steps} steps"
    lines = [
        f"Where the time of {counted} went: {whole:.2f} s, {whole / steps:.3f} s a step",
        "",
        f"{'process':<32}{'CPU seconds':>12}  what it did",
    ]
    kinds = [name.split()[0] for name in computed]
    rows = [*computed, *(kind for kind in did if kind not in kinds)]  # the latter are on other machines
    for name in sorted(rows, key=lambda name: ([*did, name.split()[0]].index(name.split()[0]), name)):
        seconds = f"{computed[name]:.2f}" if name in computed else "?"
        lines.append(f"{name:<32}{seconds:>12}  {did.get(name.split()[0], '')}".rstrip())
    if trainer:
        lines += ["", "The trainer's next steps, which were traced, by part:"]
        lines += [
            f"    {name:<40}{_share(seconds, trainer['seconds'])}"
            for name, seconds in sorted(trainer["parts"].items(), key=lambda each: -each[1])
        ]
        lines += ["", "Operations that took longest, by themselves:"]
        lines += [
            f"    {each['name'][:40]:<40}{_share(each['seconds'], trainer['seconds'])}, {each['calls']} calls"
            for each in trainer["operations"]
        ]
    return "\n".join(lines) + "\n"


def _share(seconds: float, whole: float) -> str:
    return f"{seconds:.2f} s ({seconds / whole:.0%})" if whole else f"{seconds:.2f} s"


def _read(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found


def told(directory: Path, steps: int) -> str:
    """Say at the end of a run where its profile is, with the table."""
    try:
        text = (directory / TABLE).read_text()
    except OSError:
        return (
            f"there is no profile: it needs {steps_of_profile(steps)[1]} steps of this process, which ended "
            "before; use a larger trainer.steps, or a smaller --profile"
        )
    return f"{text}\nThe traces are in {directory}; https://ui.perfetto.dev shows them."
