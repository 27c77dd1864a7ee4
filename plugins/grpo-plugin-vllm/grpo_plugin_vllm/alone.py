"""Calls that are decoded one after the other: what a call samples then depends on no other call."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from grpo_core import GenerationRequest

Entry = tuple[int, GenerationRequest]


class Queue:
    """The calls that wait, each of which begins when no request runs."""

    def __init__(self) -> None:
        self._waiting: deque[Sequence[Entry]] = deque()
        self._running: set[int] = set()

    def put(self, call: Sequence[Entry]) -> None:
        """Take a call.  One whose requests are all greedy and for one token, as a canary's, goes first."""
        if all(request.max_tokens == 1 and request.temperature == 0.0 for _, request in call):
            self._waiting.appendleft(call)
        else:
            self._waiting.append(call)

    def next(self) -> Sequence[Entry]:
        """Return the call that begins now; empty if there is none, or if another one runs."""
        if self._running or not self._waiting:
            return ()
        call = self._waiting.popleft()
        self._running = {key for key, _ in call}
        return call

    def ended(self, key: int) -> None:
        self._running.discard(key)

    def forget(self, keys: set[int]) -> set[int]:
        """Forget requests; return those that run."""
        left = ([entry for entry in call if entry[0] not in keys] for call in self._waiting)
        self._waiting = deque(call for call in left if call)
        running = self._running & keys
        self._running -= keys
        return running
