"""Measures how busy generation is, and counts tokens and errors, between two steps."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from grpo_core.contracts.records import Rollout
from grpo_core.loop.buffer import BufferStatistics


class Meter:
    """Busy time and token counts between two steps, on the event loop's clock."""

    def __init__(self) -> None:
        self._running = 0
        self._busy = 0.0
        self._since: float | None = None
        self._tokens = 0
        self._errors: dict[str, int] = defaultdict(int)
        self._last = 0.0

    def begin(self) -> None:
        """Start measuring with the first step."""
        self._last = self.now()

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Count the time inside this context as busy."""
        self._running += 1
        if self._since is None:
            self._since = self.now()
        try:
            yield
        finally:
            self._running -= 1
            if self._running == 0 and self._since is not None:
                self._busy += self.now() - self._since
                self._since = None

    def count(self, task: str, rollout: Rollout) -> None:
        self._tokens += rollout.n_sampled
        if rollout.error is not None:
            self._errors[task] += 1

    def read(
        self, buffer: BufferStatistics, *, trained: Mapping[str, float], waited: float
    ) -> dict[str, float]:
        """Return metrics since the last call.

        ``overlap`` is the share of the step's time in which both sides work, if one of them always does.
        Generated tokens are divided by the time in which rollouts are played, trained tokens by the time in
        which the trainer computes.
        """
        now = self.now()
        elapsed = max(now - self._last, 1e-9)
        if self._since is not None:
            self._busy += now - self._since
            self._since = now
        training = trained.get("time/train", 0.0)
        metrics = {
            "time/step": elapsed,
            "time/wait_for_groups": waited,
            "time/generate": self._busy,
            "tokens_per_second/generation": self._tokens / self._busy if self._busy else 0.0,
            "tokens_per_second/training": trained.get("tokens/trained", 0.0) / training if training else 0.0,
            "overlap": min(max(self._busy + training - elapsed, 0.0) / elapsed, 1.0),
            "buffer/in_flight": float(buffer.in_flight),
            "buffer/retrying": float(buffer.retrying),
            "buffer/ready": float(buffer.ready),
            "buffer/dispatched": float(buffer.dispatched),
            "buffer/skipped": float(buffer.skipped),
            "buffer/filtered": float(buffer.filtered),
            "buffer/attempts": float(buffer.attempts),
            **{f"errors/{task}": float(count) for task, count in sorted(self._errors.items())},
        }
        self._last, self._busy, self._tokens = now, 0.0, 0
        self._errors.clear()
        return metrics

    @staticmethod
    def now() -> float:
        """Return the time on the event loop's clock, in seconds."""
        return asyncio.get_running_loop().time()
