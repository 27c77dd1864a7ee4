"""``asyncio.Runner``, as far as environments' calls use it, for Pythons before 3.11, which do not have it."""

from __future__ import annotations

import asyncio


class Runner:
    """Has an event loop, and closes it with all that runs in it."""

    def __init__(self) -> None:
        self._loop = _event_loop()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def close(self) -> None:
        """Cancel what is left, wait until it has ended, and close the event loop."""
        if self._loop.is_closed():
            return
        try:
            self._loop.run_until_complete(_end_of_others())
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.run_until_complete(self._loop.shutdown_default_executor())
        finally:
            asyncio.set_event_loop(None)
            self._loop.close()


def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the current event loop: before Python 3.10, locks that an environment has made belong to it."""
    policy = asyncio.get_event_loop_policy()
    try:
        loop = policy.get_event_loop()
    except RuntimeError:  # asyncio.run has ended, and taken it away
        loop = policy.new_event_loop()
    return policy.new_event_loop() if loop.is_closed() else loop


async def _end_of_others() -> None:
    if tasks := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
