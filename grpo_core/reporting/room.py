"""Warns when the disk of a run will soon be full."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from grpo_core.contracts.events import Event, StepEnded, WarningRaised
from grpo_core.contracts.protocols import Tracker
from grpo_core.reporting.stored import TEXTS, TOKENS
from grpo_core.storage.run_directory import ROLLOUTS

FEWEST_STEPS = 100
"""Number of further steps for which the disk should have room."""
FIRST = 5
"""Number of steps after which the growth of the run can be estimated."""


class DiskRoom(Tracker):
    """Compares the growth of a run's files with the free bytes of its disk, at each step.

    Checkpoints do not count: newer ones replace older ones.

    Args:
        directory: of the run.
        num_steps: number of steps of the run.
        emit: receives the warning.
        free: returns the free bytes of a directory's disk.
    """

    def __init__(
        self,
        directory: Path,
        num_steps: int,
        emit: Callable[[Event], None],
        free: Callable[[Path], int] = lambda directory: shutil.disk_usage(directory).free,
    ) -> None:
        self._directory, self._num_steps, self._emit, self._free = directory, num_steps, emit, free
        self._begin: tuple[int, int] | None = None
        """Step and size of the growing files when the first step ended."""
        self._rollouts: list[int] = []
        """Sizes of the files of the newest rollouts."""

    def event(self, event: Event) -> None:
        """Look at the disk when a step ends."""
        if not isinstance(event, StepEnded):
            return
        grown = sum(_size(self._directory / name) for name in ("events.jsonl", "metrics.jsonl"))
        written = self._directory / ROLLOUTS / f"step-{event.step - 1:06d}"  # of the step before
        newest = sum(_size(Path(f"{written}{suffix}")) for suffix in (*TEXTS, TOKENS))
        self._rollouts = [*self._rollouts[-FIRST:], newest]
        first, size = self._begin = self._begin or (event.step, grown)
        steps = event.step - first
        left = min(FEWEST_STEPS, self._num_steps - event.step)
        if steps < FIRST or not left:
            return
        per_step = (grown - size) / steps + sum(self._rollouts) / len(self._rollouts)
        free = self._free(self._directory)
        if per_step * left > free:
            message = (
                f"the disk has room for about {int(free / per_step):,} more steps: {free / 1e6:,.3f} MB are "
                f"free, and a step takes {per_step / 1e6:,.3f} MB. Make room, or end the run and continue it "
                "with --resume and --set tracking.files.keep=N, tracking.files.every=N or "
                "tracking.files.tokens=false"
            )
            self._emit(WarningRaised(step=event.step, cause="disk", message=message))


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else 0
