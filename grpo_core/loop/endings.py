"""Ends of a run before its last step: a goal that is reached, a time that is nearly over, or an error."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field, frozen

from grpo_core.config import GOAL
from grpo_core.contracts.errors import ConfigError, did_you_mean
from grpo_core.loop.metrics import AT_TIMES, COMPARED, lacks_scores

PARTS = ("step", "cut", "save", "cut", "save")
"""A run that stops may have to end all of these: a step with its publication, and two checkpoints with their
cuts: that of the step, and the last one."""

MARGIN = 1.5
"""Steps and checkpoints may take this many times longer than the longest so far."""

SHORTEST = 0.01
"""Seconds that are not worth another wait."""

UNKNOWN = 0.03
"""Share of the time limit that is set aside for each of them that has not been measured yet."""


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
        """Read a condition like "validation/sort/accuracy >= 0.95", which the configuration has checked."""
        match = GOAL.fullmatch(text)
        assert match is not None
        return cls(match[1], 1.0 if match[2] == ">=" else -1.0, float(match[3]))

    def reached(self, values: Mapping[str, float]) -> bool:
        return self.metric in values and self.sign * values[self.metric] >= self.sign * self.bound

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
                f"trainer.stop_when is about {self.metric!r}, which nothing measures."
                f"{did_you_mean(self.metric, set(values))} Measured are {', '.join(sorted(values))}"
            )


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
