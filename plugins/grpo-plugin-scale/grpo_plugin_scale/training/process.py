"""The trainer ``torch`` of this plugin in child processes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Sequence
from functools import partial
from typing import Any

from attrs import evolve

from grpo_core import ChildDied, GrpoError, TrainerSetup, errors
from grpo_core.kit import ProcessTrainer, TrainerProcess, aio, scratch_directory
from grpo_core.training import plan
from grpo_core.training.process import StartProcess
from grpo_plugin_scale.config import ScaledConfig

DEATH_IS_SEEN = 2.0
"""Seconds within which the death of a process is detected, as the cause of other errors."""


class ScaledProcess(ProcessTrainer):
    """A ``ScaledTrainer`` in a child process, or in one child process for each rank."""

    target = "grpo_plugin_scale.training.trainer:create"

    def __init__(self, setup: TrainerSetup, start: StartProcess | None = None, /) -> None:
        ranks, start = setup.section(ScaledConfig).ranks, start or self.in_child
        super().__init__(setup, start if ranks == 1 else partial(Together, start, ranks))


class Together(TrainerProcess):
    """The processes of several ranks behind the interface of one.

    If one fails, the others are stopped, because they would wait for it.

    Args:
        start: starts the process of a rank.
        size: number of ranks.
        target: factory of a rank's trainer, like ``ProcessTrainer.target``.
        setup: setup of the trainer.
        name: name in messages.
    """

    def __init__(self, start: StartProcess, size: int, target: str, setup: TrainerSetup, name: str) -> None:
        self.name, self._updates = name, setup.trainer.updates_per_step
        self._layout: Any = None
        self._closing = contextlib.ExitStack()
        where = f"{self._closing.enter_context(scratch_directory())}/rendezvous"
        self.ranks: Sequence[TrainerProcess] = [
            start(target, evolve(setup, rank=rank, ranks=size, rendezvous=where), f"{name} rank {rank}")
            for rank in range(size)
        ]

    async def started(self, *, seconds: float) -> Any:
        about, *_ = await self._all([rank.started(seconds=seconds) for rank in self.ranks])
        self._layout = about["layout"]
        return about

    async def call(self, method: str, *args: Any, seconds: float | None) -> Any:
        """Call a method of all ranks; return the first rank's result."""
        each = [args] * len(self.ranks)
        if method == "step":
            divide = partial(plan.shares, updates=self._updates, ranks=len(self.ranks), layout=self._layout)
            method, each = "train", [(share,) for share in await asyncio.to_thread(divide, *args)]
        calls = [rank.call(method, *its, seconds=seconds) for rank, its in zip(self.ranks, each, strict=True)]
        return (await self._all(calls, writes=method in ("save", "written")))[0]

    async def died(self) -> GrpoError:
        """Wait until a rank ends; return the reason."""
        waits = [asyncio.create_task(rank.died()) for rank in self.ranks]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await aio.cancel(waits)
        return done.pop().result()

    def kill(self, why: GrpoError | None = None) -> None:
        for rank in self.ranks:
            rank.kill(why)

    async def aclose(self) -> None:
        await asyncio.gather(*(rank.aclose() for rank in self.ranks))
        self._closing.close()

    async def _all(self, calls: Sequence[Coroutine[Any, Any, Any]], *, writes: bool = False) -> list[Any]:
        """Await a call of each rank.  Raises the first error, or the death of a rank, which causes others.

        If a rank fails, the others are stopped, except after a disk error of a call that ``writes``, so that
        training continues.
        """
        try:
            return await aio.gather(calls)
        except Exception as error:
            if writes and isinstance(error, OSError):
                raise
            reason: Exception = error
            if not isinstance(error, GrpoError):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(DEATH_IS_SEEN):
                        reason = await self.died()
            for rank in self.ranks:
                rank.kill(ChildDied(f"{rank.name} was stopped: {errors.one_line(reason)}"))
            raise reason from error.__cause__
