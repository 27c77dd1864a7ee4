"""Small additions to asyncio: run awaitables together, try again, and find the error that started it all."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any, Self, TypeVar

from attrs import define, field

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
    """Await all together; the first error cancels the others, awaits them, and is raised as it is."""
    with raising_root_cause():
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(awaitable) for awaitable in awaitables]
    return [task.result() for task in tasks]


@contextlib.asynccontextmanager
async def time_limit(seconds: float | None, late: Callable[[], GrpoError]) -> AsyncIterator[None]:
    """Raise ``late()`` if the block takes longer than ``seconds``; None is no deadline.

    A TimeoutError of the block itself, such as that of a socket, passes through: it is no deadline of ours.
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
    """A limit of time that leaves out what is ``not_counted``: waits for a service that is away.

    A block under it (``async with``) raises TimeoutError at the limit.  Several blocks may share its time,
    one after the other.

    Attributes:
        seconds: of all blocks together; None is no limit.
        left: seconds that are left outside of a block.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = self.left = seconds
        self.expired = False
        """Whether the last block was too long."""
        self._timer: asyncio.Timeout | None = None
        self._since = 0.0
        """Time since which ``left`` is used up."""
        self._waits = 0
        """Number of waits that run now and are not counted."""

    async def __aenter__(self) -> Self:
        self._token = _limits.set((*_limits.get(), self))
        self._timer = await asyncio.timeout(None).__aenter__()
        self.restart(self.left)
        return self

    async def __aexit__(self, *error: Any) -> None:
        self._use()
        timer, self._timer = self._timer, None
        _limits.reset(self._token)
        assert timer is not None
        self.expired = timer.expired()
        await timer.__aexit__(*error)

    def restart(self, seconds: float | None) -> None:
        """Allow the block that runs so many seconds from now on."""
        self.left, self._since = seconds, _now()
        self._arm()

    def wait(self, change: int) -> None:
        """Take the beginning (1) or the end (-1) of a wait that is not counted."""
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
    """Leave the time of the block out of the limits (``Limit``) of all tasks that wait for this one."""
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
    """Cancel tasks and wait until they have ended; what they raise is ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def to_the_end(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a new event loop, which a signal ends at once.

    Raises KeyboardInterrupt if the coroutine is cancelled.  Its threads are left behind then.
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


class Changes:
    """Lets tasks wait until shared state has an answer for them.

    Whoever changes the state calls ``notify``.  The questions of all waiting tasks are then asked on the next
    iteration of the event loop, so that changes that happen together are seen together, and only the tasks
    that have an answer wake up.  A question may change the state itself (take what it found); the others are
    asked again after it.
    """

    def __init__(self) -> None:
        self._waiters: list[_Waiter] = []
        self._scheduled = False

    def notify(self) -> None:
        """Ask the waiting tasks' questions on the next iteration of the event loop."""
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._ask_all)

    async def until(self, question: Callable[[], T | None]) -> T:
        """Wait until ``question()`` returns something other than None, and return it.

        Raises whatever ``question`` raises.
        """
        waiter = _Waiter(question, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self.notify()
        try:
            answer: T = await waiter.answer
            return answer
        finally:
            waiter.answer.cancel()

    def _ask_all(self) -> None:
        self._scheduled = False
        place = 0
        while place < len(self._waiters):
            waiter = self._waiters[place]
            if waiter.answer.done() or waiter.ask():
                del self._waiters[place]
                place = 0  # the answer may have changed the state for those before
            else:
                place += 1


@define(eq=False)
class _Waiter:
    """A task that waits in ``Changes.until``."""

    question: Callable[[], Any]
    answer: asyncio.Future[Any]

    def ask(self) -> bool:
        """Ask the question; return whether the task has its answer, which may be an error."""
        try:
            answer = self.question()
        except BaseException as error:
            self.answer.set_exception(error)
            return True
        if answer is not None:
            self.answer.set_result(answer)
        return answer is not None


UNLIMITED = 2**62
"""A number of slots that is never used up."""


class Slots:
    """A number of slots, of which a call may take several; a free one goes to the call that waited longest.

    A call that takes more waits until as many are free, and those that came after it wait for it.  A call
    that takes all of them is alone.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.taken = 0
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
                self.taken -= slots
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            slots, turn = self._waiting[0]
            if not turn.cancelled():
                if self.taken + slots > self.number:
                    return
                self.taken += slots
                turn.set_result(None)
            self._waiting.popleft()


DEATH_IS_SEEN = 2.0
"""Seconds within which whoever watches a process knows that it has ended."""


@define
class RestartBudget:
    """Counts failures in a row; ``limit`` of them exhaust it, and a success makes it whole again."""

    limit: int
    failures: int = field(default=0, init=False)

    @property
    def exhausted(self) -> bool:
        """Whether to stop trying again."""
        return self.failures >= self.limit

    def failed(self) -> None:
        self.failures += 1

    def succeeded(self) -> None:
        self.failures = 0

    async def run(
        self, call: Callable[[], Awaitable[T]], *, on: type[Exception] | tuple[type[Exception], ...]
    ) -> T:
        """Await ``call()``, again after each failure, until it succeeds or the budget is exhausted.

        Raises the last of the errors ``on``, and any other error at once.
        """
        while True:
            try:
                result = await call()
            except on:
                self.failed()
                if self.exhausted:
                    raise
            else:
                self.succeeded()
                return result
