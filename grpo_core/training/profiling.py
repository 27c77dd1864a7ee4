"""Traces some steps of a trainer with torch's profiler, and adds up where their time went."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType

from grpo_core.training.setup import steps_of_profile

PREFIX = "grpo_core: "
"""Before the names of the parts of a step in a trace."""
OPERATIONS = 8
"""Number of operations that are reported, the longest first."""


_seconds: dict[str, float] = {}
"""Seconds of the parts since they were taken last."""


@contextmanager
def part(name: str) -> Iterator[None]:
    """Make a part of a step, in a trace and in the seconds that ``taken_parts`` returns.

    It costs microseconds.  On a GPU the seconds are those until the work was handed over.
    """
    began = time.perf_counter()
    with torch.profiler.record_function(f"{PREFIX}{name}"):
        yield
    _seconds[name] = _seconds.get(name, 0.0) + time.perf_counter() - began


def taken_parts() -> dict[str, float]:
    """Return the seconds of each part since the last call."""
    found = dict(_seconds)
    _seconds.clear()
    return found


class StepProfiler:
    """Traces ``steps`` steps, and writes them into ``directory`` when they are over.

    Args:
        rank: number of this process among the trainer's; it is in the files' names.
        steps: number of steps; 0 traces nothing.
    """

    def __init__(self, directory: str, *, steps: int, rank: int, device: torch.device) -> None:
        self._directory, self._rank, self._device = Path(directory), rank, device
        self._first, self._last = steps_of_profile(steps) if steps and directory else (0, 0)
        self._number, self._profiler, self._began = 0, None, 0.0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Count a step; the traced ones are those inside this context, and what happens between them."""
        self._number += 1
        if self._number == self._first:
            self._begin()
        yield
        if self._number == self._last:
            self._end()

    def _begin(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = torch.profiler.profile(activities=activities)  # type: ignore[assignment]
        self._profiler.start()  # type: ignore[attr-defined]
        self._began = time.perf_counter()

    def _end(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        seconds = time.perf_counter() - self._began
        profiler: Any = self._profiler
        profiler.stop()
        self._profiler = None
        self._directory.mkdir(parents=True, exist_ok=True)
        stem = f"trainer-{self._rank + 1}" if self._rank else "trainer"
        profiler.export_chrome_trace(str(self._directory / f"{stem}.trace.json.gz"))
        told = {"steps": self._last - self._first + 1, "seconds": seconds, **_summary(profiler, self._device)}
        (self._directory / f"{stem}.json").write_text(json.dumps(told, indent=1) + "\n")


def _summary(profiler: Any, device: torch.device) -> dict[str, Any]:
    """Return the seconds of the parts of the steps, and of the operations that take longest.

    On a GPU both are seconds of the GPU.
    """
    gpu = device.type == "cuda"
    parts, operations = _of_gpu(profiler.events()) if gpu else _of_cpu(profiler.key_averages())
    longest = sorted(operations, key=lambda each: -each["seconds"])
    return {"parts": parts, "operations": longest[:OPERATIONS]}


def _of_cpu(averages: Iterable[Any]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    parts, operations = {}, []
    for each in averages:
        if each.key.startswith(PREFIX):
            parts[each.key.removeprefix(PREFIX)] = each.cpu_time_total / 1e6
        elif each.key.startswith("aten::"):
            seconds = each.self_cpu_time_total / 1e6
            operations.append({"name": each.key, "seconds": seconds, "calls": each.count})
    return parts, operations


def _of_gpu(events: Iterable[Any]) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Add up the kernels that were launched while a part ran, and those of each operation.

    A backward pass launches its kernels in another thread, so torch does not count them to the part that
    waits for it.  The GPU's own events are left out: they would count each kernel a second time, and a part
    with the gaps in it.
    """
    here = [each for each in events if each.device_type == DeviceType.CPU]
    waiting = sorted((each for each in here if each.key.startswith(PREFIX)), key=_begin, reverse=True)
    parts = dict.fromkeys((each.key.removeprefix(PREFIX) for each in waiting), 0.0)
    running: list[Any] = []
    operations: dict[str, dict[str, Any]] = {}
    for each in sorted((each for each in here if each.kernels), key=_begin):
        seconds = sum(kernel.duration for kernel in each.kernels) / 1e6
        while waiting and _begin(waiting[-1]) <= _begin(each):
            running.append(waiting.pop())
        running = [part for part in running if part.time_range.end > _begin(each)]
        for part in running:
            parts[part.key.removeprefix(PREFIX)] += seconds
        said = operations.setdefault(each.key, {"name": each.key, "seconds": 0.0, "calls": 0})
        said["seconds"] += seconds
        said["calls"] += 1
    return parts, [said for name, said in operations.items() if not name.startswith(PREFIX)]


def _begin(event: Any) -> float:
    began: float = event.time_range.start
    return began
