"""The trainer in a process of its own: what the pipeline awaits.  Imports no torch, to start at once."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from grpo_core.errors import ChildDied, GrpoError, TrainerError, one_line
from grpo_core.processes import Child, RemoteTraceback
from grpo_core.protocols import Trainer
from grpo_core.records import Batch, StepResult, Weights
from grpo_core.training.memory import trainer_parts
from grpo_core.training.setup import TrainerSetup

RESUME = (
    "The steps since the newest checkpoint are lost; continue from there with grpo-core train --resume RUN"
)
MEMORY = "look for a lack of memory: lower trainer.tokens_per_microbatch"


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

    memory = staticmethod(trainer_parts)

    def __init__(self, setup: TrainerSetup) -> None:
        self._deadline = setup.trainer.deadline
        self._log = Path(setup.log) if setup.log else None
        self._child = Child(
            self.target, {"setup": setup}, name="trainer", environ=setup.env_vars, log=self._log
        )

    async def started(self) -> None:
        with self._explaining("cannot be made"):
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
        with self._explaining(f"{method}() failed", f"{RESUME}. If nothing else explains it, {MEMORY}"):
            return await self._child.call(method, *args, seconds=self._deadline)

    @contextlib.contextmanager
    def _explaining(self, what: str, hint: str = "") -> Iterator[None]:
        """Raise errors of the child as one line for the user, and write their tracebacks to its log."""
        try:
            yield
        except Exception as error:
            told: Exception = error  # a disk's error is for those who wait for a checkpoint
            if isinstance(error, GrpoError):
                told = _gone(error)
            elif not isinstance(error, OSError):
                told = _foreign(error, what, self._log, hint)
            if self._log is not None and isinstance(error.__cause__, RemoteTraceback):
                with contextlib.suppress(OSError), self._log.open("a") as log:
                    log.write(f"{error.__cause__}\n")
            if told is error:
                raise
            raise told from error


def _gone(error: GrpoError) -> GrpoError:
    if not isinstance(error, ChildDied):
        return error
    return TrainerError(f"{error}\n{RESUME}. If nobody killed it, {MEMORY}")


def _foreign(error: Exception, what: str, log: Path | None, hint: str) -> TrainerError:
    """Describe an error that grpo-core did not raise, such as a lack of memory that torch reports."""
    where = f"; the traceback is in {log}" if log is not None else ""
    text = f"trainer: {what}: {type(error).__name__}: {one_line(error)}{where}"
    return TrainerError(f"{text}. {hint}" if hint else text)
