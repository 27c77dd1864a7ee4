"""Small additions to asyncio: run awaitables together, and find the error that started it all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from typing import Any, TypeVar

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


async def cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended; what they raise is ignored."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
