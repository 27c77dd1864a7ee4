"""Places for the rollouts of agents in the workers of an environment."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from grpo_core.processes.aio import not_counted


class Places:
    """Rollouts wait in order until a worker has a free place.  A further worker is used if all are busy.

    Args:
        workers: largest number of workers.
        each: number of rollouts that a worker plays at once.
        used: number of workers that are used from the start.
    """

    def __init__(self, workers: int, each: int, used: int = 1) -> None:
        self.each, self.used = each, used
        self._free = [each] * workers
        self._waiting: deque[tuple[int | None, asyncio.Future[int]]] = deque()

    @contextlib.asynccontextmanager
    async def take(self, home: int | None) -> AsyncIterator[int]:
        """Hold a place during the block, in the worker ``home`` if that is given; yields the worker.

        The wait for it does not count for the rollout's deadline.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((home, turn))
        self._admit()
        try:
            with not_counted():
                worker = await turn
            yield worker
        finally:
            if turn.done() and not turn.cancelled():
                self._free[turn.result()] += 1
            self._admit()

    def further(self, busy: int) -> int:
        """Return a worker that was not used so far, or ``busy`` if there is none."""
        if self.used == len(self._free):
            return busy
        self.used += 1
        return self.used - 1

    def _admit(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for home, turn in waiting:
            if turn.cancelled():
                continue
            worker = home if home is not None else max(range(self.used), key=self._free.__getitem__)
            if not self._free[worker] and home is None:
                worker = self.further(worker)
            if self._free[worker]:
                self._free[worker] -= 1
                turn.set_result(worker)
            else:
                self._waiting.append((home, turn))
