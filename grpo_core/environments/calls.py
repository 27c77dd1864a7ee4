"""Calls of an environment that run at the same time: async code in one event loop, other code outside.

A call is a generator of steps.  It runs on the main thread while no event loop runs, so code that is not
async may use signals, hang, or run its own event loop.  It yields awaitables; one event loop awaits them
concurrently for all calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from attrs import define, field, frozen

from grpo_core.contracts.errors import DeadlineExceeded
from grpo_core.processes.served import Call, Connection

T = TypeVar("T")

Steps = Generator[Sequence[Awaitable[Any]], list[Any], T]
"""A call that yields awaitables, receives their results or errors in order, and returns its result."""

CLEANING = 5.0
"""Seconds for a cancelled call to end before its process is at fault."""


@frozen(eq=False)
class Begun:
    """The steps of a call and their limits.

    Attributes:
        seconds: time after which its awaitables are cancelled; None is no limit.
        completes: whether its steps continue after that, with the results and errors so far.
    """

    steps: Steps[Any]
    seconds: float | None = None
    completes: bool = False


@define(eq=False)
class _Running:
    """A running call."""

    id: int
    method: str
    begun: Begun
    began: float = field(factory=time.monotonic)
    task: asyncio.Task[list[Any]] | None = None
    timer: asyncio.TimerHandle | None = None
    dropped: bool = False
    """Whether it was cancelled: nobody waits for its result."""


class Calls:
    """Runs calls: one to its end (``run``), or all from a connection (``serve``).

    Args:
        who: name of the environment in errors.
        at_once: largest number of awaitables of one call that run at once; 0 means no limit.
    """

    def __init__(self, who: str, at_once: int = 0) -> None:
        self._who, self._at_once = who, at_once
        self._runner = asyncio.Runner()
        self._running: dict[int, _Running] = {}
        self._ended: deque[_Running] = deque()
        """Calls whose awaitables are done, so that their next steps may run."""
        self._awaited: asyncio.Task[list[Any]] | None = None
        """The task for which ``run`` waits."""
        self._loops = False
        """Whether the event loop is in use; it then also runs between calls, for tasks that a call left
        running."""
        self._stuck = ""

    def run(self, steps: Steps[T]) -> T:
        """Run a call to its end, and nothing else meanwhile."""
        results: list[Any] | None = None
        while True:
            try:
                awaitables = steps.send(results)  # type: ignore[arg-type]  # None before the first ones
            except StopIteration as end:
                result: T = end.value
                return result
            loop = self._runner.get_loop()
            self._awaited = task = loop.create_task(_all(awaitables, self._at_once))
            while not task.done():
                # sys.exit() in a task leaves the event loop, and is raised again where the task is awaited
                with contextlib.suppress(SystemExit):
                    loop.run_until_complete(task)
            self._awaited = None
            results = task.result()

    def interrupt(self) -> None:
        """Cancel the call that ``run`` waits for in another thread; ``run`` continues with its errors."""
        if (task := self._awaited) is not None:
            self._runner.get_loop().call_soon_threadsafe(task.cancel)

    def serve(self, connection: Connection, begin: Callable[[Call], Begun | None]) -> None:
        """Answer the calls of a connection; calls that await something run concurrently.

        Args:
            begin: returns the steps of a call, or None if it answered the call itself.

        Raises EOFError if the parent is gone, RuntimeError if a cancelled call does not end.
        """
        while True:
            if self._loops:
                self._wait()
            while self._ended:
                self._step(self._ended.popleft(), connection)
            call = connection.receive(wait=not self._loops)
            if call is None:
                continue
            if call.method == "cancel":
                self._drop(self._running.get(call.args[0]))
            elif (begun := begin(call)) is not None:
                self._running[call.id] = _Running(call.id, call.method, begun)
                self._step(self._running[call.id], connection)

    def cancel_all(self) -> list[Awaitable[Any]]:
        """Cancel the other calls; return awaitables that end with them."""
        tasks = [running.task for running in self._running.values() if running.task is not None]
        for running in list(self._running.values()):
            self._drop(running)
        return [asyncio.wait(tasks)] if tasks else []

    def close(self) -> None:
        """Close the event loop and its remaining tasks; only code that is not async may follow."""
        self._loops = False
        self._runner.close()

    # ------------------------------------------------------------------------------ internals

    def _wait(self) -> None:
        """Run the event loop until a call can continue, or the connection has a new one."""
        with contextlib.suppress(SystemExit, KeyboardInterrupt):  # see run
            self._runner.get_loop().run_forever()
        if self._stuck:
            raise RuntimeError(self._stuck)

    def _step(self, running: _Running, connection: Connection) -> None:
        """Run a call until it awaits something or ends."""
        if running.dropped and not running.begun.completes:
            self._forget(running)
            return
        results = None if running.task is None else running.task.result()
        try:
            awaitables = running.begun.steps.send(results)  # type: ignore[arg-type]
        except StopIteration as end:
            self._forget(running)
            if not running.dropped:
                try:
                    connection.reply(running.id, end.value)
                except OSError:
                    raise
                except Exception as error:  # it cannot be pickled
                    connection.fail(running.id, error)
        except Exception as error:
            self._forget(running)
            if not running.dropped:
                connection.fail(running.id, error.with_traceback(_of_plugin(error.__traceback__)))
        else:
            self._await(running, awaitables, connection)

    def _await(self, running: _Running, awaitables: Sequence[Awaitable[Any]], connection: Connection) -> None:
        loop = self._runner.get_loop()
        if not self._loops:
            self._loops = True
            loop.add_reader(connection.fileno(), loop.stop)
        running.task = loop.create_task(_all(awaitables, self._at_once))
        running.task.add_done_callback(lambda _: self._done(running))
        if running.begun.seconds is not None and not running.dropped:
            due = running.began + running.begun.seconds
            running.timer = loop.call_at(due, self._late, running, connection)

    def _done(self, running: _Running) -> None:
        if running.timer is not None:
            running.timer.cancel()
        self._ended.append(running)
        self._runner.get_loop().stop()

    def _late(self, running: _Running, connection: Connection) -> None:
        message = f"no answer to {running.method!r} within {running.begun.seconds:g} s; cancelled"
        connection.fail(running.id, DeadlineExceeded(f"{self._who}: {message}"))
        self._drop(running)

    def _drop(self, running: _Running | None) -> None:
        """Cancel a call's awaitables; it gets no answer."""
        if running is None or running.dropped or running.task is None:
            return
        running.dropped = True
        running.task.cancel()
        self._runner.get_loop().call_later(CLEANING, self._expect_end, running)

    def _expect_end(self, running: _Running) -> None:
        if running.id in self._running:
            self._stuck = f"{self._who}: {running.method!r} continued {CLEANING:g} s after its cancellation"
            self._runner.get_loop().stop()

    def _forget(self, running: _Running) -> None:
        del self._running[running.id]
        running.begun.steps.close()


async def _all(awaitables: Sequence[Awaitable[Any]], at_once: int) -> list[Any]:
    """Return the result or error of each; a cancellation cancels them all and is their error."""
    gate = asyncio.Semaphore(at_once or len(awaitables))

    async def one(awaitable: Awaitable[Any]) -> Any:
        try:
            async with gate:
                return await awaitable
        except BaseException as error:
            return error

    tasks = [asyncio.create_task(one(awaitable)) for awaitable in awaitables]
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError as error:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        return [error if task.cancelled() else task.result() for task in tasks]
    return [task.result() for task in tasks]


def _of_plugin(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame outside grpo-core; the whole one if there is none."""
    own, core = frames, str(Path(__file__).parent.parent) + os.sep
    while own is not None and own.tb_frame.f_code.co_filename.startswith(core):
        own = own.tb_next
    return own or frames
