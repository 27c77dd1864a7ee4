"""Reasons to end a run before its last step: a goal, a time limit, an error; and when a checkpoint is due."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field, frozen

from grpo_core.config import GOAL
from grpo_core.contracts.advantages import reaches
from grpo_core.contracts.errors import ConfigError, did_you_mean
from grpo_core.loop.metrics import AT_TIMES, COMPARED, lacks_scores

PARTS = ("step", "cut", "save", "cut", "save")
"""Parts that a run may have to finish before it stops: a step with its publication, and two checkpoints with
their cuts, the step's and the last one."""

MARGIN = 1.5
"""Steps and checkpoints may take this many times longer than the longest so far."""

SHORTEST = 0.01
"""Seconds too short for another wait."""

UNKNOWN = 0.03
"""Fraction of the time limit reserved for each part that has not been measured yet."""


GOAL_REACHED = "goal reached"
"""Reason of an end by ``trainer.stop_when``."""


@frozen
class Goal:
    """A condition on a metric that ends a run."""

    metric: str
    sign: float
    """1 if the metric has to be at least the bound, -1 if at most."""
    bound: float

    @classmethod
    def parse(cls, text: str) -> Goal:
        """Parse a checked condition like "validation/sort/accuracy >= 0.95"."""
        match = GOAL.fullmatch(text)
        assert match is not None
        return cls(match[1], 1.0 if match[2] == ">=" else -1.0, float(match[3]))

    def reached(self, values: Mapping[str, float]) -> bool:
        return self.metric in values and reaches(self.sign * values[self.metric], self.sign * self.bound)

    def check(self, values: Mapping[str, float]) -> None:
        """Raise ConfigError if the values of a step or a validation show that nothing measures the metric."""
        part, _, name = self.metric.rpartition("/")
        if self.metric in values or name in (*COMPARED, "unscored") or lacks_scores(self.metric, values):
            return
        if self.metric.startswith("validation/"):
            absent = any(other.startswith(f"{part}/") for other in values)
        else:  # a step without rows has no metrics of the loss
            name, known = self.metric.partition("/")[0], {other.partition("/")[0] for other in values}
            trained = values.get("tokens/trained", 0.0) > 0
            absent = trained and name not in known and not name.startswith(AT_TIMES)
        if absent:
            raise ConfigError(
                f"trainer.stop_when names {self.metric!r}, which nothing measures."
                f"{did_you_mean(self.metric, set(values))} Measured: {', '.join(sorted(values))}"
            )


@frozen(kw_only=True)
class Failure:
    """An error that ends a run, as recorded in its last checkpoint."""

    error: str
    proved: int | None
    """The newest version that the canary proved the engine to use."""


@define
class TimeLimit:
    """Decides when a run must stop for its last checkpoint to be complete before the limit.

    Args:
        end: the time of the limit, on the clock of its caller.
        seconds: seconds from the start of the program to the limit.
    """

    end: float
    seconds: float
    _longest: dict[str, float] = field(init=False, factory=dict)

    def observe(self, part: str, seconds: float) -> None:
        """Record the duration of a part of the run, one of ``PARTS``."""
        self._longest[part] = max(seconds, self._longest.get(part, 0.0))

    def left(self, now: float) -> float:
        """Return the seconds until the run must stop; 0 or less means now."""
        unknown = UNKNOWN * self.seconds
        reserve = [self._longest.get(part, unknown) for part in PARTS]
        left = self.end - now - max(MARGIN * sum(reserve), unknown)
        return left if left >= SHORTEST else 0.0


# ---------------------------------------------------------------------------------- when a checkpoint is due

SPARED = 20
"""Least time between timed checkpoints, as a multiple of the seconds that the last one took."""


@define
class Saves:
    """Decides after each step whether a checkpoint is due.

    Args:
        every: number of steps from one to the next; 0 is none by steps.
        seconds: seconds from one to the next; 0 is none by time.
        begun: when the newest checkpoint, or the run, began.
    """

    every: int = 0
    seconds: float = 0.0
    begun: float = 0.0
    _took: float | None = field(init=False, default=0.0)
    """Seconds that the newest one took; None while it is written."""

    def saving(self, now: float) -> None:
        """Record the start of a checkpoint."""
        self.begun, self._took = now, None

    def saved(self, now: float) -> None:
        """Record the end of a checkpoint."""
        self._took = now - self.begun

    def due(self, step: int, now: float) -> bool:
        """Return whether a checkpoint is due after a step."""
        if self.every and step % self.every == 0:
            return True
        if not self.seconds or self._took is None:
            return False
        return now - self.begun >= max(self.seconds, SPARED * self._took)
