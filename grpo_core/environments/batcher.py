"""Merges the calls of many rollouts into few calls of an environment.

Rollouts end one by one, but most environments are fastest in batches.  Episodes that arrive during a call, or
within ``max_wait`` of the first arrival, share the next call.  Each environment has one batcher, which serves
training and validation alike.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from attrs import define, field

from grpo_core.contracts.errors import GrpoError, PluginError

T = TypeVar("T")
R = TypeVar("R")


@define(eq=False)
class _Submission(Generic[T, R]):
    items: list[T]
    arrived: float
    answer: asyncio.Future[list[R]]
    sent: int = 0
    results: list[R] = field(factory=list)

    @property
    def left(self) -> int:
        return len(self.items) - self.sent


def one_each(results: Sequence[R], items: Sequence[object]) -> Sequence[R]:
    """Return the results of a call.  Raises PluginError unless there is one per item."""
    if len(results) != len(items):
        raise PluginError(f"a call with {len(items)} items returned {len(results)} results")
    return results


class MicroBatcher(Generic[T, R]):
    """Merges submissions into calls of at most ``max_batch`` items, one call at a time.

    Args:
        call: takes a list and returns as many results.
        max_batch: largest number of items in a call.  A longer submission is split.
        max_wait: seconds that the first item waits for others while no call is running.
        together: never split a submission, however long it is (for environments that compare rollouts).

    An exception of ``call`` is raised to the callers in that batch only.  If all of them were cancelled, a
    PluginError is raised to the next caller.
    """

    def __init__(
        self,
        call: Callable[[list[T]], Awaitable[Sequence[R]]],
        *,
        max_batch: int,
        max_wait: float,
        together: bool = False,
    ) -> None:
        self._call = call
        self._max_batch = max_batch
        self._max_wait = max_wait
        self.together = together
        self._queue: deque[_Submission[T, R]] = deque()
        self._waiting = 0
        self._timer: asyncio.TimerHandle | None = None
        self._running: asyncio.Task[None] | None = None
        self._broken: PluginError | None = None
        """A contract error that no caller has received."""
        self._closed = False

    async def submit(self, items: Sequence[T]) -> list[R]:
        """Return one result for each item, in order.  Cancelling the caller removes its items."""
        if self._closed:
            raise GrpoError("the batcher is closed")
        if self._broken is not None:
            raise self._broken
        if not items:
            return []
        loop = asyncio.get_running_loop()
        submission = _Submission[T, R](list(items), loop.time(), loop.create_future())
        self._queue.append(submission)
        self._waiting += submission.left
        self._schedule()
        try:
            return await submission.answer
        finally:
            self._withdraw(submission)

    async def aclose(self) -> None:
        """Stop the running call; all waiting callers get a GrpoError."""
        self._closed = True
        self._cancel_timer()
        for submission in list(self._queue):
            self._fail(submission, GrpoError("the batcher was closed before its call began"))
        if self._running is not None:
            self._running.cancel()
            await asyncio.wait([self._running])

    # ------------------------------------------------------------------------------ internals

    def _schedule(self) -> None:
        """Start the next call if it is full, or schedule it for the end of the first item's wait."""
        if self._running is not None or not self._queue:
            return
        if self._waiting >= self._max_batch:
            self._start()
        elif self._timer is None:
            due = self._queue[0].arrived + self._max_wait
            self._timer = asyncio.get_running_loop().call_at(due, self._start)

    def _start(self) -> None:
        self._cancel_timer()
        parts = self._take()
        if parts:
            self._running = asyncio.get_running_loop().create_task(self._run(parts), name="batched call")

    def _take(self) -> list[tuple[_Submission[T, R], list[T]]]:
        """Return the next batch, as pieces of submissions in order of arrival."""
        parts: list[tuple[_Submission[T, R], list[T]]] = []
        room = self._max_batch
        while self._queue and room > 0:
            submission = self._queue[0]
            if submission.answer.done():  # it has just failed, or its caller was cancelled
                self._withdraw(submission)
                continue
            if self.together and parts and submission.left > room:
                break
            size = submission.left if self.together else min(submission.left, room)
            parts.append((submission, submission.items[submission.sent : submission.sent + size]))
            submission.sent += size
            room -= size
            self._waiting -= size
            if not submission.left:
                self._queue.popleft()
        return parts

    async def _run(self, parts: list[tuple[_Submission[T, R], list[T]]]) -> None:
        items = [item for _, piece in parts for item in piece]
        try:
            results = await self._call(items)
            one_each(results, items)
        except asyncio.CancelledError:
            for submission, _ in parts:
                self._fail(submission, GrpoError("the batcher was closed during its call"))
            raise
        except Exception as error:
            if isinstance(error, PluginError) and all(submission.answer.done() for submission, _ in parts):
                self._broken = error
            for submission, _ in parts:
                self._fail(submission, error)
        else:
            self._deliver(parts, results)
        finally:
            self._running = None
            self._schedule()

    def _deliver(self, parts: list[tuple[_Submission[T, R], list[T]]], results: Sequence[R]) -> None:
        begin = 0
        for submission, piece in parts:
            submission.results += results[begin : begin + len(piece)]
            begin += len(piece)
            if len(submission.results) == len(submission.items) and not submission.answer.done():
                submission.answer.set_result(submission.results)

    def _fail(self, submission: _Submission[T, R], error: Exception) -> None:
        """Give the caller an error; the rest of its submission in the queue is skipped."""
        if not submission.answer.done():
            submission.answer.set_exception(error)

    def _withdraw(self, submission: _Submission[T, R]) -> None:
        if submission.left:
            self._waiting -= submission.left
            self._queue.remove(submission)
            submission.sent = len(submission.items)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
