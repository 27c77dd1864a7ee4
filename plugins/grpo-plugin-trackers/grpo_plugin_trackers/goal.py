"""The tracker ``goal``: ends a run when a metric reaches a value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import grpo_core as grpo

CONDITION = re.compile(r"\s*(\S+)\s*(>=|<=)\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s*")
"""The name of a metric, the comparison, and a number."""


class Goal(grpo.Tracker):
    """Ends the run with a checkpoint as soon as a metric of a step or of a validation reaches a value.

    A run that has reached its goal ends again when it is resumed with the same one.

    Args:
        when: the goal, as in ``validation/sort/accuracy >= 0.95`` or ``mismatch_kl <= 0.5``.
    """

    def __init__(self, run: grpo.RunInfo, when: str) -> None:
        if (match := CONDITION.fullmatch(when)) is None:
            raise grpo.ConfigError(
                f"tracking.goal.when is {when!r}; expected NAME >= NUMBER or NAME <= NUMBER, as in "
                "validation/sort/accuracy >= 0.95"
            )
        self._run, self._when = run, when
        self._metric, self._above, self._bound = match[1], match[2] == ">=", float(match[3])
        self._beside = f"{match[1].rpartition('/')[0]}/" if "validation/" in match[1] else "time/step"
        """Beginning of the name of a number that is there whenever the metric may be there."""
        self._reached = self._warned = False

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        value = values.get(self._metric)
        if value is not None:
            self._reached = value >= self._bound if self._above else value <= self._bound
        elif not self._warned and any(name.startswith(self._beside) for name in values):
            self._warned = True
            near = grpo.did_you_mean(self._metric, set(values))
            self._run.warn(f"the goal {self._when}: step {step} has no such metric.{near}")
        self._end()

    def state_dict(self) -> Mapping[str, Any]:
        return {"when": self._when, "reached": self._reached}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._reached = bool(state.get("reached")) and state.get("when") == self._when
        self._end()

    def _end(self) -> None:
        if self._reached:
            self._run.stop(f"goal reached: {self._when}")
