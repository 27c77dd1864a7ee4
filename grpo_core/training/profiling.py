"""Traces some steps of a trainer with torch's profiler."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from grpo_core.config.run import steps_of_profile

PREFIX = "grpo_core: "
"""Prefix of the names of a step's parts in a trace."""
ROWS = 30
"""Number of operations in the table, longest first."""


_seconds: dict[str, float] = {}
"""Seconds of the parts since the last ``take_seconds``."""


@contextmanager
def part(name: str) -> Iterator[None]:
    """Mark a part of a step, in a trace and in the seconds that ``take_seconds`` returns.

    It costs microseconds.  On a GPU they end when the work is queued.
    """
    began = time.perf_counter()
    with torch.profiler.record_function(f"{PREFIX}{name}"):
        yield
    _seconds[name] = _seconds.get(name, 0.0) + time.perf_counter() - began


def take_seconds() -> dict[str, float]:
    """Return the seconds of each part since the last call."""
    found = dict(_seconds)
    _seconds.clear()
    return found


class StepProfiler:
    """Traces ``steps`` steps, and writes them into ``directory`` when they are over.

    Args:
        rank: rank of this process, which is in the files' names.
        steps: number of steps; 0 traces nothing.
    """

    def __init__(self, directory: str, *, steps: int, rank: int, device: torch.device) -> None:
        self._directory, self._rank, self._device = Path(directory), rank, device
        self._first, self._last = steps_of_profile(steps) if steps and directory else (0, 0)
        self._number = 0
        self._profiler: Any = None

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count a step; the trace covers steps inside this context, and the time between them."""
        self._number += 1
        cuda = self._device.type == "cuda"
        if self._number == self._first:
            activity = torch.profiler.ProfilerActivity
            activities = [activity.CPU, activity.CUDA] if cuda else [activity.CPU]
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.start()
        yield
        if self._number == self._last:
            if cuda:
                torch.cuda.synchronize(self._device)
            profiler, self._profiler = self._profiler, None
            profiler.stop()
            self._directory.mkdir(parents=True, exist_ok=True)
            stem = f"trainer-{self._rank + 1}" if self._rank else "trainer"
            profiler.export_chrome_trace(str(self._directory / f"{stem}.trace.json.gz"))
            by = f"self_{self._device.type}_time_total"
            table = profiler.key_averages().table(sort_by=by, row_limit=ROWS)
            (self._directory / f"{stem}.txt").write_text(table)
