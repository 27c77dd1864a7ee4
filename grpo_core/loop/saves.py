"""When a checkpoint is due: by steps and by time.  Pure."""

from __future__ import annotations

from attrs import define, field

SPARED = 20
"""Least time between timed checkpoints, as a multiple of the seconds that the last one took."""


@define
class Saves:
    """Decides after each step whether a checkpoint is due.

    Args:
        every: number of steps from one to the next; 0 is none by steps.
        seconds: seconds from one to the next; 0 is none by time.
    """

    every: int = 0
    seconds: float = 0.0
    _begun: float = field(init=False, default=0.0)
    """When the newest checkpoint, or the run, began."""
    _took: float | None = field(init=False, default=0.0)
    """Seconds that the newest one took; None while it is written."""

    def begin(self, now: float) -> None:
        """Record the start of the run."""
        self._begun = now

    def saving(self, now: float) -> None:
        """Record the start of a checkpoint."""
        self._begun, self._took = now, None

    def saved(self, now: float) -> None:
        """Record the end of a checkpoint."""
        self._took = now - self._begun

    def due(self, step: int, now: float) -> bool:
        """Return whether a checkpoint is due after a step."""
        if self.every and step % self.every == 0:
            return True
        if not self.seconds or self._took is None:
            return False
        return now - self._begun >= max(self.seconds, SPARED * self._took)
