"""Small additions to asyncio: run awaitables together, retry, and find the root cause of an error."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Self, TypeVar

from grpo_core.contracts.errors import GrpoError
from grpo_core.processes import interrupts

T = TypeVar("T")


def root_cause(error: BaseException) -> BaseException:
    """Return the first error in a group that is not a cancellation."""
    while isinstance(error, BaseExceptionGroup):
        errors = [e for e in error.exceptions if not isinstance(e, asyncio.CancelledError)]
        error = (errors or error.exceptions)[0]
    return error


@contextlib.contextmanager
def raising_root_cause() -> Iterator[None]:
    """Raise the root cause instead of an exception group, with the cause's own ``__cause__``."""
    try:
        yield
    except BaseExceptionGroup as group:
        cause = root_cause(group)
        raise cause from cause.__cause__


async def gather(awaitables: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all together; the first error cancels the others, waits for them, and is raised unchanged.

    Before Python 3.13, the error of an ``asyncio.TaskGroup`` leaves its task with a cancellation that is
    counted: an ``asyncio.timeout`` around it then ends in CancelledError.
    """
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    if not tasks:
        return []
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        await cancel(tasks)
    errors = [task.exception() for task in tasks if task in done and not task.cancelled()]
    with raising_root_cause():
        for error in filter(None, errors):
            raise error
    return [task.result() for task in tasks]


@contextlib.asynccontextmanager
async def time_limit(seconds: float | None, late: Callable[[], GrpoError]) -> AsyncIterator[None]:
    """Raise ``late()`` if the block takes longer than ``seconds``; None is no deadline.

    A TimeoutError of the block itself, such as a socket's, passes through: it is not this deadline.
    """
    timer = asyncio.timeout(seconds)
    try:
        async with timer:
            yield
    except TimeoutError:
        if not timer.expired():
            raise
        raise late() from None


class Limit:
    """A time limit that excludes ``not_counted`` time: waits for an unavailable service.

    A block under it (``async with``) raises TimeoutError at the limit.  Several blocks may share its time,
    one after the other.

    Attributes:
        seconds: limit for all blocks together; None is no limit.
        left: seconds that remain, outside a block.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = self.left = seconds
        self.expired = False
        """Whether the last block exceeded the limit."""
        self._timer: asyncio.Timeout | None = None
        self._since = 0.0
        """Time from which ``left`` is counted down."""
        self._waits = 0
        """Number of current waits that are not counted."""
        self._parts: list[Limit] = []

    @contextlib.asynccontextmanager
    async def part(self) -> AsyncIterator[Limit]:
        """Limit one of several tasks of the running block to the time that the block has left.

        The block's own time stands meanwhile.  At its end, it has used at least what each part has.
        """
        self._use()
        part = Limit(self.seconds)
        part.left = self.left
        self._parts.append(part)
        with not_counted():
            async with part:
                yield part

    async def __aenter__(self) -> Self:
        self._token = _limits.set((*_limits.get(), self))
        self._since = _now()
        self._timer = await asyncio.timeout(None if self._waits else self.left).__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._use()
        timer, self._timer = self._timer, None
        _limits.reset(self._token)
        if self.left is not None:
            self.left = min([self.left, *(part.left or 0.0 for part in self._parts)])
            self._parts.clear()
        assert timer is not None
        self.expired = timer.expired()
        await timer.__aexit__(*error)

    def restart(self, seconds: float | None) -> None:
        """Allow the running block this many seconds from now."""
        self.left, self._since = seconds, _now()
        self._arm()

    def wait(self, change: int) -> None:
        """Record the start (1) or the end (-1) of a wait that is not counted."""
        self._use()
        self._waits += change
        self._arm()

    def _use(self) -> None:
        if self.left is not None and not self._waits:
            self.left -= _now() - self._since
        self._since = _now()

    def _arm(self) -> None:
        if self._timer is not None and not self._timer.expired():
            self._timer.reschedule(None if self._waits or self.left is None else self._since + self.left)


_limits: ContextVar[tuple[Limit, ...]] = ContextVar("limits that stand while a service is away", default=())


@contextlib.contextmanager
def not_counted() -> Iterator[None]:
    """Exclude the block's time from the limits (``Limit``) of all tasks that wait for this one."""
    limits = _limits.get()
    for limit in limits:
        limit.wait(1)
    try:
        yield
    finally:
        for limit in limits:
            limit.wait(-1)


def _now() -> float:
    return asyncio.get_running_loop().time()


async def cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended; their errors are ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def to_the_end(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop; a signal ends it at once.

    Raises KeyboardInterrupt if the coroutine is cancelled.  Its threads are then abandoned.
    """

    async def interruptible() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None
        asked = False

        def end(name: str) -> None:
            nonlocal asked
            if not asked:
                asked = True
                loop.call_soon_threadsafe(task.cancel)
            elif name != "SIGHUP":  # a terminal that is closed may send it twice
                raise KeyboardInterrupt(name)

        try:
            with interrupts.received(end):
                return await main
        except asyncio.CancelledError:
            loop.set_default_executor(ThreadPoolExecutor(1))  # asyncio waits for the threads of the loop's
            raise

    try:
        return asyncio.run(interruptible())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


def in_own_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end: on another thread if an event loop runs on this one."""
    if asyncio._get_running_loop() is None:  # otherwise a signal would wait for the thread
        return asyncio.run(main)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, asyncio.run, main).result()


class Changes:
    """Lets tasks wait for a condition on shared state.

    After each change of the state, call ``notify``.  The next iteration of the event loop evaluates the
    questions of all waiting tasks, so simultaneous changes are seen together, and only tasks with an answer
    wake up.  A question may change the state itself (take what it found); the others are then evaluated
    again.
    """

    def __init__(self) -> None:
        self._waiters: list[tuple[Callable[[], Any], asyncio.Future[Any]]] = []
        """The questions of the waiting tasks, with their answers."""
        self._scheduled = False

    def notify(self) -> None:
        """Evaluate the waiting tasks' questions on the next iteration of the event loop."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._ask_all)

    async def until(self, question: Callable[[], T | None]) -> T:
        """Wait until ``question()`` returns something true, and return it.

        Raises whatever ``question`` raises.
        """
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiters.append((question, answer))
        self.notify()
        try:
            return await answer
        finally:
            answer.cancel()

    def _ask_all(self) -> None:
        self._scheduled = False
        place = 0
        while place < len(self._waiters):
            question, answer = self._waiters[place]
            if not answer.done():
                try:
                    if found := question():
                        answer.set_result(found)
                except BaseException as error:
                    answer.set_exception(error)
            if answer.done():
                del self._waiters[place]
                place = 0  # the answer may have changed the state for earlier waiters
            else:
                place += 1


UNLIMITED = 2**62
"""A number of slots that is never exhausted."""


class FairSemaphore:
    """A fair semaphore whose callers may take several slots; a free one goes to the longest waiter.

    A call that takes several waits until as many are free, and later calls wait behind it.  A call that takes
    all of them runs alone.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def take(self, slots: int = 1) -> AsyncIterator[None]:
        """Hold this many slots during the block, or all if there are fewer; wait until they are free."""
        slots = min(slots, self.number)
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((slots, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self.used -= slots
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            slots, turn = self._waiting[0]
            if not turn.cancelled():
                if self.used + slots > self.number:
                    return
                self.used += slots
                turn.set_result(None)
            self._waiting.popleft()


DEATH_IS_SEEN = 2.0
"""Seconds until a watched process that ended is known to be dead."""


async def repeated(call: Callable[[], Awaitable[T]], times: int, *on: type[Exception]) -> T:
    """Await ``call()``, and again after one of these errors: at most so many times.  Raises the last one."""
    for _ in range(times - 1):
        with contextlib.suppress(*on):
            return await call()
    return await call()
