"""The trainer in a child process, which the pipeline awaits.  Imports no torch, to start at once."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast

from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.errors import ChildDied, GrpoError, TrainerError, fault_of, one_line
from grpo_core.contracts.protocols import Trainer
from grpo_core.contracts.records import Batch, StepResult, Weights
from grpo_core.processes.child import Child
from grpo_core.processes.served import RemoteTraceback

MEMORY = "look for a lack of memory: set trainer.tokens_per_microbatch = 4096"


class TrainerProcess(Protocol):
    """The process of a trainer: a ``Child`` of this one, or a process elsewhere.  It starts at once."""

    name: str
    """Its name in messages."""

    async def started(self, *, seconds: float) -> Any:
        """Return when its trainer is made.  Raises the trainer's error, ChildDied or DeadlineExceeded."""

    async def call(self, method: str, *args: Any, seconds: float | None) -> Any:
        """Call a method of its trainer; raises as ``started`` does, and kills a late process."""

    async def died(self) -> GrpoError:
        """Wait until it has ended for any reason, and return the reason."""
        ...

    def kill(self, why: GrpoError | None = None) -> None:
        """End it now; calls that wait raise ``why`` or ChildDied."""

    async def aclose(self) -> None:
        """End it, and wait for its end."""


StartProcess = Callable[[str, TrainerSetup, str], TrainerProcess]
"""Starts a process without waiting for it: ``(target, setup, name)``, as ``ProcessTrainer.in_child``."""


class ProcessTrainer(Trainer):
    """A ``TorchTrainer`` in a separate process: the trainer "torch".

    Args:
        setup: the setup of the trainer.
        start: starts the process; a child of this process if it is None.
    """

    target: str = "grpo_core.training.trainer:create"
    """``"module:function"`` that makes the trainer in its process from ``setup``; subclasses name others."""
    process: TrainerProcess
    """Its process, which ``started`` starts."""

    def __init__(self, setup: TrainerSetup, start: StartProcess | None = None, /) -> None:
        self._deadline = setup.trainer.deadline
        self._log = Path(setup.log) if setup.log else None
        self._start = partial(start or self.in_child, self.target, setup, "trainer")

    @staticmethod
    def in_child(target: str, setup: TrainerSetup, name: str) -> TrainerProcess:
        """Start a child of this process."""
        log = Path(setup.log) if setup.log else None
        return Child(target, {"setup": setup}, name=name, environ=setup.env_vars, log=log)

    async def started(self) -> None:
        with self._explaining("cannot be made"):
            self.process = self._start()
            await self.process.started(seconds=self._deadline)

    async def step(self, batch: Batch) -> StepResult:
        return cast(StepResult, await self._call("step", batch))

    async def unchanged(self) -> bool:
        return bool(await self._call("unchanged"))

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        return cast(Weights, await self._call("publish", canary))

    async def save(self, directory: Path) -> Callable[[], Awaitable[None]]:
        await self._call("save", directory)
        return partial(self._call, "written")

    async def watch(self) -> None:
        raise _gone(await self.process.died())

    async def aclose(self) -> None:
        if hasattr(self, "process"):
            await self.process.aclose()

    async def _call(self, method: str, *args: Any) -> Any:
        with self._explaining(f"{method}() failed", f"If nothing else explains it, {MEMORY}"):
            return await self.process.call(method, *args, seconds=self._deadline)

    @contextlib.contextmanager
    def _explaining(self, what: str, hint: str = "") -> Iterator[None]:
        """Raise errors of the child as one line for the user, and write their tracebacks to its log."""
        try:
            yield
        except Exception as error:
            explained: Exception = error  # the caller that waits for a checkpoint handles a disk error
            if isinstance(error, GrpoError):
                explained = _gone(error)
            elif not isinstance(error, OSError):
                explained = _foreign(error, what, self._log, hint)
            if self._log is not None and isinstance(error.__cause__, RemoteTraceback):
                with contextlib.suppress(OSError), self._log.open("a") as log:
                    log.write(f"{error.__cause__}\n")
            if explained is error:
                raise
            raise explained from error


def _gone(error: GrpoError) -> GrpoError:
    if not isinstance(error, ChildDied):
        return error
    return TrainerError(f"{error}\nIf nobody killed it, {MEMORY}")


def _foreign(error: Exception, what: str, log: Path | None, hint: str) -> TrainerError:
    """Describe an error that grpo-core did not raise, such as a lack of memory that torch reports."""
    where = f"; the traceback is in {log}" if log is not None else ""
    fault = fault_of(error)
    frame = f"{fault.where}: " if fault.where else ""
    text = f"trainer: {what}: {frame}{type(error).__name__}: {one_line(error)}{where}"
    return TrainerError(f"{text}. {hint}" if hint else text).carrying(fault)
