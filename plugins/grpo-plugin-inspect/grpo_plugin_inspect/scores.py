"""Conversion of Inspect's scores to a reward."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

from attrs import frozen

NOT_MEASURED = ("grader_failed", "scoring_failed")
"""Reasons of Inspect's scores that mean a failure of the grader, not of the model."""
_TELLING = {"yes", "true", "no", "false"}


@frozen(kw_only=True)
class Judged:
    """The scorers' values of a reply, and the reward."""

    reward: float | None
    metrics: Mapping[str, float]
    why: str = ""
    """Reason for a missing reward."""


def judged(scores: Mapping[str, Any], weights: Mapping[str, float]) -> Judged:
    """Return the weighted mean of the scorers' values.

    The default weight is 1; a scorer with weight 0 is only a metric.  If a scorer with a weight has no value,
    there is no reward: a mean of the others would be on a different scale.
    """
    metrics: dict[str, float] = {}
    total = of = 0.0
    missing = ""
    for name, score in scores.items():
        weight = weights.get(name, 1.0)
        value, why = _value(score)
        if value is None:
            missing = missing or (f"the scorer {name} gives no score: {why}" if weight else "")
            continue
        metrics[name] = value
        if isinstance(score.value, Mapping):
            parts = {f"{name}_{part}": _number(each) for part, each in score.value.items()}
            metrics |= {part: each for part, each in parts.items() if each is not None}
        total, of = total + weight * value, of + weight
    if missing:
        return Judged(reward=None, metrics=metrics, why=missing)
    return Judged(reward=total / of, metrics=metrics)


def _value(score: Any) -> tuple[float | None, str]:
    """Return the value of a score as a number, or the reason why it has none."""
    if score is None:
        return None, "it returned None"
    reasons = str(score.explanation or "")[:200]
    if score.reason in NOT_MEASURED:
        return None, f"{score.reason}. {reasons}".strip()
    given = score.value
    parts = list(given.values()) if isinstance(given, Mapping) else given
    if isinstance(parts, list | tuple):
        numbers = [_number(part) for part in parts if part is not None]
        known = [number for number in numbers if number is not None]
        if not known or len(known) < len(numbers):
            return None, f"its value {given!r:.100} is not made of numbers"
        return sum(known) / len(known), ""
    number = _number(given)
    if number is None:
        return None, f"its value is {given!r:.100}. {reasons}".strip()
    return number, ""


def _number(value: Any) -> float | None:
    """Convert a value like Inspect's metrics; None where they only warn."""
    scorers = importlib.import_module("inspect_ai.scorer")
    named = (scorers.CORRECT, scorers.INCORRECT, scorers.PARTIAL, scorers.NOANSWER)
    if isinstance(value, str) and value not in named and value.lower() not in _TELLING:
        try:
            float(value)
        except ValueError:
            return None
    elif not isinstance(value, str | int | float):
        return None
    number = float(scorers.value_to_float()(value))
    return number if math.isfinite(number) else None
