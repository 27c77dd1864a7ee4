"""Sequential decoding of calls, so that the results of a call do not depend on other calls."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from grpo_core import GenerationRequest

Entry = tuple[int, GenerationRequest]


class Queue:
    """A queue of calls; the next one starts when no request runs."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence[Entry]] = deque()
        self._running: set[int] = set()

    def put(self, call: Sequence[Entry]) -> None:
        """Add a call; greedy calls for one token, such as a canary, go first."""
        if all(request.max_tokens == 1 and request.temperature == 0.0 for _, request in call):
            self._waiting.appendleft(call)
        else:
            self._waiting.append(call)

    def next(self) -> Sequence[Entry]:
        """Return the call to start now; empty if there is none, or another one runs."""
        if self._running or not self._waiting:
            return ()
        call = self._waiting.popleft()
        self._running = {key for key, _ in call}
        return call

    def ended(self, key: int) -> None:
        self._running.discard(key)

    def forget(self, keys: set[int]) -> set[int]:
        """Remove requests; return the running ones among them."""
        left = ([entry for entry in call if entry[0] not in keys] for call in self._waiting)
        self._waiting = deque(call for call in left if call)
        running = self._running & keys
        self._running -= keys
        return running
