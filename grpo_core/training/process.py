"""The trainer in a process of its own: what the pipeline awaits.  Imports no torch, to start at once."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from grpo_core.errors import ChildDied, GrpoError, TrainerError
from grpo_core.processes import Child
from grpo_core.protocols import Trainer
from grpo_core.records import Batch, StepResult, Weights
from grpo_core.training.setup import TrainerSetup


def thread_count(configured: int, colocated: bool) -> int:
    """Return the number of torch threads: as configured, or for 0 half of the cores if engines share them."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return configured or max(1, cores // 2 if colocated else cores)


class ProcessTrainer(Trainer):
    """A ``TorchTrainer`` in a child process: the trainer "torch".

    It starts at construction, so that its imports overlap with the rest of a run's start.
    """

    target: ClassVar[str] = "grpo_core.training.trainer:create"
    """Makes the trainer in the child from ``setup``, as ``module:function``; a subclass may name another."""

    def __init__(self, setup: TrainerSetup) -> None:
        self._deadline = setup.trainer.deadline
        log = Path(setup.log) if setup.log else None
        self._child = Child(self.target, {"setup": setup}, name="trainer", log=log)

    async def started(self) -> None:
        await self._child.started(seconds=self._deadline)

    async def step(self, batch: Batch) -> StepResult:
        result: StepResult = await self._call("step", batch)
        return result

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        weights: Weights = await self._call("publish", canary)
        return weights

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        await self._call("save", directory)
        return partial(self._call, "written")

    async def watch(self) -> None:
        raise _gone(await self._child.died())

    async def aclose(self) -> None:
        await self._child.aclose()

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await self._child.call(method, *args, seconds=self._deadline)
        except ChildDied as error:
            raise _gone(error) from error


def _gone(error: GrpoError) -> GrpoError:
    if not isinstance(error, ChildDied):
        return error
    return TrainerError(
        f"{error}\nThe steps since the newest checkpoint are lost; continue from there with "
        "grpo-core train --resume RUN. If nobody killed it, look for a lack of memory: lower "
        "trainer.tokens_per_microbatch"
    )
