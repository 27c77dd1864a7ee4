"""Calls of an environment: one after the other until the first awaits something, then in one event loop.

A call is a coroutine that awaits only what its environment returned.  All code runs on the main thread, so
that it may use signals; while no event loop runs, code that is not async may also run its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from attrs import frozen

from grpo_core.contracts.errors import DeadlineExceeded
from grpo_core.processes.served import Call, Connection

T = TypeVar("T")

CLEANING = 5.0
"""Seconds for a cancelled call to end before its process is at fault."""


Begun = tuple[Coroutine[Any, Any, Any], float | None]
"""A call, and the seconds after which it is cancelled; None is no limit."""


@frozen(eq=False)
class _Running:
    """A call that awaits something."""

    call: Call
    task: asyncio.Task[None]
    dropped: asyncio.Event
    """Set if it was cancelled: nobody waits for its result."""


class Calls:
    """Runs calls: one to its end (``run``), or all from a connection (``serve``).

    Args:
        who: name of the environment in errors.
        begin: returns a call of a connection, or None if it answered the call itself.
        at_once: largest number of awaitables of one call that run at once; 0 means no limit.
    """

    def __init__(self, who: str, begin: Callable[[Call, Connection], Begun | None], at_once: int = 0) -> None:
        self._who, self._begin, self._at_once = who, begin, at_once
        self._runner = asyncio.Runner()
        self._running: dict[int, _Running] = {}
        self._alone: asyncio.Task[Any] | None = None
        """The call for which ``run`` waits."""
        self._loops = False
        """Whether ``serve`` runs the event loop, also for tasks that a call left running."""
        self._error: Exception | None = None
        """Why ``serve`` ends."""

    def run(self, call: Coroutine[Any, Any, T]) -> T:
        """Run a call to its end, and nothing else meanwhile."""
        try:
            call.send(None)
        except StopIteration as end:
            result: T = end.value
            return result
        loop = self._runner.get_loop()
        self._alone = task = loop.create_task(call)
        while not task.done():
            # sys.exit() in a task leaves the event loop, and is raised again where the task is awaited
            with contextlib.suppress(SystemExit):
                loop.run_until_complete(task)
        self._alone = None
        return task.result()

    def interrupt(self) -> None:
        """Cancel the call that ``run`` waits for in another thread."""
        if (task := self._alone) is not None:
            self._runner.get_loop().call_soon_threadsafe(task.cancel)

    def serve(self, connection: Connection) -> None:
        """Answer the calls of a connection.

        Raises EOFError if the parent is gone, RuntimeError if a cancelled call does not end.
        """
        while self._error is None:
            if not self._loops:
                self._receive(connection)
                continue
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # see run
                self._runner.get_loop().run_forever()
        if isinstance(self._error, EOFError):
            self.close()
        raise self._error

    async def each(
        self, function: Callable[[Any], Any], items: Sequence[Any], *, completes: bool = False
    ) -> list[Any]:
        """Return the result or error of ``function`` for each item; see ``gathered``."""
        results: list[Any] = []
        for item in items:
            try:
                results.append(function(item))
            except BaseException as error:  # sys.exit(), or a library's timeout: the process survives
                results.append(error)
        if waiting := [i for i, result in enumerate(results) if inspect.isawaitable(result)]:
            awaited = await self.gathered([results[i] for i in waiting], completes=completes)
            for i, result in zip(waiting, awaited, strict=True):
                results[i] = result
        return results

    async def gathered(self, awaitables: Sequence[Awaitable[Any]], *, completes: bool = False) -> list[Any]:
        """Await together, and return the result or error of each.

        Args:
            completes: whether a call that is cancelled continues, with the results and errors so far.
        """
        if not self._loops:
            await asyncio.sleep(0)  # from here on an event loop runs the call
        gate = asyncio.Semaphore(self._at_once or len(awaitables))

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
            if not completes:
                raise
            return [error if task.cancelled() else task.result() for task in tasks]
        return [task.result() for task in tasks]

    async def end_others(self) -> None:
        """Cancel all calls but the current one, and wait for their ends."""
        current = asyncio.current_task() if self._loops else None
        others = [running for running in self._running.values() if running.task is not current]
        for running in others:
            self._drop(running)
        if others:
            await asyncio.wait([running.task for running in others])

    def close(self) -> None:
        """Close the event loop and its remaining tasks; only code that is not async may follow."""
        self._loops = False
        self._runner.close()

    # ------------------------------------------------------------------------------ internals

    def _receive(self, connection: Connection) -> None:
        """Receive a call, and run it until it awaits something or ends."""
        try:
            call = connection.receive()
            assert call is not None
            if call.method == "cancel":
                self._drop(self._running.get(call.args[0]))
                return
            if (begun := self._begin(call, connection)) is None:
                return
            (coroutine, seconds), began, dropped = begun, time.monotonic(), asyncio.Event()
            answer = self._answer(call.id, coroutine, dropped, connection)
            if not self._loops:
                try:
                    answer.send(None)
                except StopIteration:
                    return
                self._loops = True
                self._runner.get_loop().add_reader(connection.fileno(), self._receive, connection)
            loop = self._runner.get_loop()
            running = _Running(call, loop.create_task(answer), dropped)
            self._running[call.id] = running
            running.task.add_done_callback(lambda _: self._running.pop(call.id))
            if seconds is not None:
                timer = loop.call_at(began + seconds, self._late, running, seconds, connection)
                running.task.add_done_callback(lambda _: timer.cancel())
        except Exception as error:
            self._end(error)

    async def _answer(
        self, id: int, call: Coroutine[Any, Any, Any], dropped: asyncio.Event, connection: Connection
    ) -> None:
        """Send the result or the error of a call, unless nobody waits for it."""
        try:
            result = await call
        except Exception as error:
            if not dropped.is_set():
                connection.fail(id, error.with_traceback(_of_plugin(error.__traceback__)))
            return
        if not dropped.is_set():
            try:
                connection.reply(id, result)
            except OSError:
                raise
            except Exception as error:  # it cannot be pickled
                connection.fail(id, error)

    def _late(self, running: _Running, seconds: float, connection: Connection) -> None:
        message = f"no answer to {running.call.method!r} within {seconds:g} s; cancelled"
        if not running.dropped.is_set():
            connection.fail(running.call.id, DeadlineExceeded(f"{self._who}: {message}"))
            self._drop(running)

    def _drop(self, running: _Running | None) -> None:
        """Cancel a call; it gets no answer."""
        if running is not None and not running.dropped.is_set():
            running.dropped.set()
            running.task.cancel()
            self._runner.get_loop().call_later(CLEANING, self._expect_end, running)

    def _expect_end(self, running: _Running) -> None:
        if not running.task.done():
            what = f"{running.call.method!r} continued {CLEANING:g} s after its cancellation"
            self._end(RuntimeError(f"{self._who}: {what}"))

    def _end(self, error: Exception) -> None:
        self._error = error
        if self._loops:
            self._runner.get_loop().stop()


def _of_plugin(frames: TracebackType | None) -> TracebackType | None:
    """Return a traceback from its first frame outside grpo-core; the whole one if there is none."""
    own, core = frames, str(Path(__file__).parent.parent) + os.sep
    while own is not None and own.tb_frame.f_code.co_filename.startswith(core):
        own = own.tb_next
    return own or frames
