"""Turns scores of Inspect into a reward."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from typing import Any

from attrs import frozen

NOT_MEASURED = ("grader_failed", "scoring_failed")
"""Reasons that Inspect gives for a score when the instrument failed, and not the model."""
_TELLING = {"yes", "true", "no", "false"}


@frozen(kw_only=True)
class Judged:
    """The values that the scorers of a task give a reply, and the reward that they make."""

    reward: float | None
    metrics: Mapping[str, float]
    why: str = ""
    """Why there is no reward."""


def judged(scores: Mapping[str, Any], weights: Mapping[str, float]) -> Judged:
    """Return the mean of the scorers' values, weighted.

    A scorer without a weight counts 1, one with the weight 0 is a metric only.  If a scorer that counts gives
    no value, there is no reward: a mean of the others would be another scale than that of other replies.
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
    """Return the value of a score as a number, or why it has none."""
    if score is None:
        return None, "it returned None"
    told = str(score.explanation or "")[:200]
    if score.reason in NOT_MEASURED:
        return None, f"{score.reason}. {told}".strip()
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
        return None, f"its value is {given!r:.100}. {told}".strip()
    return number, ""


def _number(value: Any) -> float | None:
    """Return a value as Inspect's metrics do, or None for what they only warn about."""
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
