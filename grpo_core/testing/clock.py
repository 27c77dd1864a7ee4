"""An event loop on virtual time: sleeping takes no real time, and a deadlock is an error at once.

    clock.run(story())           # an hour of asyncio.sleep passes in microseconds

The clock jumps to the next timer whenever nothing can run.  Without a timer nothing will ever run again: this
deadlock is raised with the waiting tasks and their lines.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Deadlock(RuntimeError):  # noqa: N818 - it is what it is
    """Raised when nothing can run and no timer is set."""


class _Selector(selectors.BaseSelector):
    """Has no files to wait for; waiting for a timer moves the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[Any, selectors.SelectorKey] = {}
        self.waiting: Any = None

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        self._keys[fileobj] = key = selectors.SelectorKey(fileobj, 0, events, data)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def get_map(self) -> Any:
        return self._keys

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("nothing can run any more; these tasks wait:\n" + "\n".join(self.waiting()))
        self.now += max(timeout, 0.0)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Asyncio on virtual time.  With a seed, tasks that can run are run in a shuffled order.

    ``watch`` is called before each step of the loop; what it raises ends the story.
    """

    def __init__(
        self,
        seed: int | None = None,
        horizon: float = 1e7,
        watch: Callable[[], None] | None = None,
    ) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._virtual.waiting = self._waiting_tasks
        self._random = random.Random(seed) if seed is not None else None
        self._horizon = horizon
        self.watch = watch

    def time(self) -> float:
        return self._virtual.now

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        """Run a function of ``asyncio.to_thread`` at once: threads take no virtual time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def _run_once(self) -> None:
        if self.watch is not None:
            self.watch()
        if self._virtual.now > self._horizon:
            raise Deadlock(
                f"still running at {self._horizon:g} virtual seconds:\n" + "\n".join(self._waiting_tasks())
            )
        ready = self._ready  # type: ignore[attr-defined]
        if self._random is not None and len(ready) > 1:
            # plain callbacks keep asyncio's order; only the order of tasks is open
            indices = [
                i
                for i, h in enumerate(ready)
                if isinstance(getattr(h._callback, "__self__", None), asyncio.Task)
            ]
            handles = [ready[i] for i in indices]
            self._random.shuffle(handles)
            for i, handle in zip(indices, handles, strict=True):
                ready[i] = handle
        super()._run_once()  # type: ignore[misc]

    def _waiting_tasks(self) -> list[str]:
        lines = []
        for task in asyncio.all_tasks(self):
            where: Any = task.get_coro()
            while getattr(where, "cr_await", None) is not None and hasattr(where.cr_await, "cr_frame"):
                where = where.cr_await
            frame = getattr(where, "cr_frame", None)
            place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}" if frame else "?"
            lines.append(f"    {task.get_name()} at {place}")
        return sorted(lines)


def run(
    story: Coroutine[Any, Any, T],
    *,
    seed: int | None = None,
    horizon: float = 1e7,
    watch: Callable[[], None] | None = None,
) -> T:
    """Run a coroutine to its end on virtual time.  Raises Deadlock, or what the story or ``watch`` raises."""
    loop = VirtualLoop(seed, horizon, watch)
    try:
        return loop.run_until_complete(story)
    finally:
        loop.watch = None
        tasks = asyncio.all_tasks(loop)
        for task in tasks:
            task.cancel()
        if tasks:
            loop._virtual.waiting = list
            with contextlib.suppress(Deadlock):
                loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        loop.close()
