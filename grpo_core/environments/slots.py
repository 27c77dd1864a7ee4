"""Slots limit how many calls run at once; a free slot goes to the call that has waited longest."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class Slots:
    """A number of slots, of which a call may take several.

    A call that takes more waits until as many are free, and those that came after it wait for it.  A call
    that takes all of them is alone.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.taken = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @contextlib.asynccontextmanager
    async def take(self, slots: int = 1) -> AsyncIterator[None]:
        """Wait for this many slots, and hold them during the block."""
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
