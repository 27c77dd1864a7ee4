"""Ends of a run before its last step: a time that is nearly over, or an error."""

from __future__ import annotations

from attrs import define, field, frozen

PARTS = ("step", "sync", "save", "cut", "save")
"""A run that stops may have to end all of these: a step with its publication, a weight sync, the checkpoint
that is being written, and the last one with its cut."""

MARGIN = 1.5
"""Steps and checkpoints may take this many times longer than the longest so far."""

SHORTEST = 0.01
"""Seconds that are not worth another wait."""

UNKNOWN = 0.03
"""Share of the time limit that is set aside for each of them that has not been measured yet."""


@frozen(kw_only=True)
class Failure:
    """An error that ends a run, as the checkpoint that it leaves records it."""

    error: str
    proved: int | None
    """The newest version of which the canary has proved that the engine uses it."""


@define
class TimeLimit:
    """Says when a run has to stop, so that its last checkpoint is complete before the limit.

    Args:
        end: the time of the limit, on the clock of its caller.
        seconds: seconds from the start of the program to the limit.
    """

    end: float
    seconds: float
    _longest: dict[str, float] = field(init=False, factory=dict)

    def observe(self, part: str, seconds: float) -> None:
        """Take the duration of a part of the run, one of ``PARTS``."""
        self._longest[part] = max(seconds, self._longest.get(part, 0.0))

    def left(self, now: float) -> float:
        """Return the seconds until the run has to stop; 0 or less: at once."""
        unknown = UNKNOWN * self.seconds
        reserve = [self._longest.get(part, unknown) for part in PARTS]
        left = self.end - now - max(MARGIN * sum(reserve), unknown)
        return left if left >= SHORTEST else 0.0
