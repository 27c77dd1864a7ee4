"""When a checkpoint is due: every so many steps, and every so many minutes.  Pure."""

from __future__ import annotations

from attrs import define, field

SPARED = 20
"""A checkpoint that is due by time comes at the earliest when this many times the seconds that the last one
took have passed."""


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
    """Time at which the newest one was begun, or the run."""
    _took: float | None = field(init=False, default=0.0)
    """Seconds that the newest one took; None while it is written."""

    def begin(self, now: float) -> None:
        """Take the time at which the run begins."""
        self._begun = now

    def saving(self, now: float) -> None:
        """Take the time at which a checkpoint is begun."""
        self._begun, self._took = now, None

    def saved(self, now: float) -> None:
        """Take the time at which it is complete."""
        self._took = now - self._begun

    def due(self, step: int, now: float) -> bool:
        """Return whether a checkpoint is due after a step."""
        if self.every and step % self.every == 0:
            return True
        if not self.seconds or self._took is None:
            return False
        return now - self._begun >= max(self.seconds, SPARED * self._took)
