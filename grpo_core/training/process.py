"""The trainer in a child process, which the pipeline awaits.  Imports no torch, to start at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from attrs import evolve

from grpo_core.aio import DEATH_IS_SEEN, cancel, gather
from grpo_core.errors import ChildDied, GrpoError, TrainerError, one_line
from grpo_core.processes.child import Child, scratch_directory
from grpo_core.processes.served import RemoteTraceback
from grpo_core.protocols import Trainer
from grpo_core.records import Batch, StepResult, Weights
from grpo_core.training.plan import PADDED, Layout, shares
from grpo_core.training.setup import TrainerSetup

MEMORY = "look for a lack of memory: lower trainer.tokens_per_microbatch"


def thread_count(configured: int, colocated: bool, ranks: int = 1) -> int:
    """Return the number of a rank's torch threads: as configured, or for 0 its share of the cores.

    That is half of the cores if engines share them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return configured or max(1, (cores // 2 if colocated else cores) // ranks)


class RankProcess(Protocol):
    """The process of a rank: a ``Child`` of this one, or a process elsewhere.  It starts at once."""

    name: str
    """Its name in messages."""

    async def started(self, *, seconds: float) -> Any:
        """Return when its trainer is made.  Raises that one's error, ChildDied or DeadlineExceeded."""

    async def call(self, method: str, *args: Any, seconds: float | None) -> Any:
        """Call a method of its trainer; the errors are those of ``started``, and a late process is killed."""

    async def died(self) -> GrpoError:
        """Wait until it has ended for any reason, and return the reason."""
        ...

    def kill(self, why: GrpoError | None = None) -> None:
        """End it now; calls that wait raise ``why`` or ChildDied."""

    async def aclose(self) -> None:
        """End it, and wait for its end."""


class ProcessTrainer(Trainer):
    """A ``TorchTrainer`` in a child process, or in one for each rank: the trainer "torch".

    They start at construction, so that their imports overlap with the rest of a run's start.  If one rank
    fails, the others are stopped: they would wait for it.
    """

    target: str = "grpo_core.training.trainer:create"
    """Makes the trainer in the child from ``setup``, as ``module:function``; a subclass may name another."""

    def __init__(self, setup: TrainerSetup) -> None:
        self._deadline = setup.trainer.deadline
        self._updates, ranks = setup.trainer.updates_per_step, setup.trainer.ranks
        self._layout: Layout = PADDED
        self._log = Path(setup.log) if setup.log else None
        self._closing = contextlib.ExitStack()
        where = self._rendezvous() if ranks > 1 else ""
        self.children: Sequence[RankProcess] = [
            self._start(
                evolve(setup, rank=rank, ranks=ranks, rendezvous=where),
                "trainer" if ranks == 1 else f"trainer rank {rank}",
            )
            for rank in range(ranks)
        ]

    def _rendezvous(self) -> str:
        """Return where the ranks find each other, as ``TrainerSetup.rendezvous``."""
        return f"{self._closing.enter_context(scratch_directory())}/rendezvous"

    def _start(self, setup: TrainerSetup, name: str) -> RankProcess:
        """Start the process of a rank, without waiting for it; a subclass may start it elsewhere."""
        return Child(self.target, {"setup": setup}, name=name, environ=setup.env_vars, log=self._log)

    async def started(self) -> None:
        with self._explaining("cannot be made"):
            made = await self._together([rank.started(seconds=self._deadline) for rank in self.children])
        if made[0]:  # a trainer that describes itself
            self._layout = made[0].get("layout", PADDED)

    async def step(self, batch: Batch) -> StepResult:
        result: StepResult
        if len(self.children) == 1:  # it divides the batch itself
            result = await self._call("step", [batch])
        else:
            parts = await asyncio.to_thread(
                shares, batch, updates=self._updates, ranks=len(self.children), layout=self._layout
            )
            result = await self._call("train", *([part] for part in parts))
        return result

    async def unchanged(self) -> bool:
        same: bool = await self._call("unchanged", *([] for _ in self.children))
        return same

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        weights: Weights = await self._call("publish", *([canary] for _ in self.children))
        return weights

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        await self._call("save", *([directory] for _ in self.children))
        return partial(self._call, "written", *([] for _ in self.children))

    async def watch(self) -> None:
        raise _gone(await self._died())

    async def aclose(self) -> None:
        await asyncio.gather(*(rank.aclose() for rank in self.children))
        self._closing.close()

    async def _call(self, method: str, *args: Sequence[Any]) -> Any:
        """Call a method of all ranks, each with its arguments; return what rank 0 returns."""
        with self._explaining(f"{method}() failed", f"If nothing else explains it, {MEMORY}"):
            calls = [
                rank.call(method, *its, seconds=self._deadline)
                for rank, its in zip(self.children, args, strict=True)
            ]
            return (await self._together(calls, writes=method in ("save", "written")))[0]

    async def _together(
        self, calls: Sequence[Coroutine[Any, Any, Any]], *, writes: bool = False
    ) -> list[Any]:
        """Await a call of each rank.  Raises the first error; if a rank died, this is why others failed.

        Where a rank fails, the others are stopped, unless the call ``writes`` and the disk failed: then
        training goes on.
        """
        try:
            return await gather(calls)
        except Exception as error:
            if writes and isinstance(error, OSError):
                raise
            reason = error if isinstance(error, GrpoError) else await self._death() or error
            if len(self.children) > 1:
                for rank in self.children:
                    rank.kill(ChildDied(f"{rank.name} was stopped: {one_line(reason)}"))
            raise reason from error.__cause__

    async def _death(self) -> GrpoError | None:
        """Return why a rank has just ended; None if there are no others, or all live."""
        if len(self.children) > 1:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DEATH_IS_SEEN):
                    return await self._died()
        return None

    async def _died(self) -> GrpoError:
        """Wait until a rank ends, and return why."""
        waits = [asyncio.create_task(rank.died()) for rank in self.children]
        try:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(waits)
        return done.pop().result()

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
    return TrainerError(f"{error}\nIf nobody killed it, {MEMORY}")


def _foreign(error: Exception, what: str, log: Path | None, hint: str) -> TrainerError:
    """Describe an error that grpo-core did not raise, such as a lack of memory that torch reports."""
    where = f"; the traceback is in {log}" if log is not None else ""
    text = f"trainer: {what}: {type(error).__name__}: {one_line(error)}{where}"
    return TrainerError(f"{text}. {hint}" if hint else text)
