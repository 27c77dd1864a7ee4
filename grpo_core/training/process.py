"""The trainer in a process of its own: what the pipeline awaits.  Imports no torch, to start at once."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from grpo_core.config import LossConfig, ModelConfig, TrainerConfig
from grpo_core.errors import ChildDied, GrpoError, TrainerError
from grpo_core.processes import Child
from grpo_core.records import Batch, StepResult, Weights


@frozen(kw_only=True)
class TrainerSetup:
    """All that a trainer is made from; plain data, so that it can be made in a child process."""

    model: ModelConfig = field(factory=ModelConfig)
    trainer: TrainerConfig = field(factory=TrainerConfig)
    loss: LossConfig = field(factory=LossConfig)
    seed: int = 0
    colocated: bool = True
    """Another process generates on this machine meanwhile (``max_staleness`` above 0): leave it cores."""
    prepare: Callable[[], None] | None = None
    """Makes the model at ``model.path``; called in the trainer's process before the model is loaded."""
    resume_from: str | None = None
    """A directory that ``save`` wrote."""
    async_save: bool = True
    """See ``CheckpointConfig.beside``."""
    transport: Literal["shm", "cuda_ipc", "collective"] = "shm"
    """See ``EngineConfig``; from a CPU, ``device`` is the host's memory."""
    collective_host: str = "127.0.0.1"
    max_non_finite: float = 0.1
    """See ``HealthConfig``."""
    plugins: tuple[str, ...] | None = None
    """Allow-list of the plugins that a loss may come from; None: all."""
    block: tuple[str, ...] = ()
    """Plugins that are not imported."""


def thread_count(configured: int, colocated: bool) -> int:
    """Of torch on the CPU: as configured, or (0) half of the cores if something generates beside it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return configured or max(1, cores // 2 if colocated else cores)


class ProcessTrainer:
    """A ``TorchTrainer`` in a child process of its own, behind the protocol.

    It starts at construction, so that its imports overlap with the rest of a run's start.

    Args:
        setup: what the trainer is made from.
        log: file that receives what the child prints; None: the parent's standard error.
    """

    def __init__(self, setup: TrainerSetup, *, log: Path | None = None) -> None:
        self._deadline = setup.trainer.deadline
        self._child = Child("grpo_core.training.trainer:create", {"setup": setup}, name="trainer", log=log)

    async def started(self) -> dict[str, Any]:
        """Wait until the model is loaded; returns ``TorchTrainer.description()``, raises what it raised."""
        description: dict[str, Any] = await self._child.started(seconds=self._deadline)
        return description

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
        """Raises TrainerError when the child dies, though nobody waits for an answer of it."""
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
