"""Formulas of rewards: combining those of turns, scales, and prices of length.  Pure Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import fsum
from statistics import fmean

COMBINED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "sum": fsum,
    "last": lambda values: values[-1],
    "max": max,
}
"""The rules by which a metric of several turns becomes one of the rollout (``Environment.combine``)."""
EVERY = "*"
"""Stands for all names of metrics."""


def combined(values: Sequence[float], name: str, rules: Mapping[str, str]) -> float:
    """Combine what the turns of a rollout give for a metric: by its rule, or else as the mean."""
    return COMBINED[rules.get(name, rules.get(EVERY, "mean"))](values)


def scaled(reward: float, source: Sequence[float], target: Sequence[float]) -> float:
    """Clip a reward to the range ``source``, and map that range linearly to ``target``.

    Args:
        reward: the reward.
        source: smallest and largest reward; others are clipped.
        target: what these two become.
    """
    (low, high), (bottom, top) = source, target
    return bottom + (min(max(reward, low), high) - low) / (high - low) * (top - bottom)


def overlong(
    length: float, *, limit: float, buffer: float, penalty: float = 1.0, bounded: bool = True
) -> float:
    """Return what its length adds to a reward: DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).

    ::

        0                                             length <= limit - buffer
        -penalty * (length - limit + buffer) / buffer     up to the limit
        -penalty                                      beyond it

    Args:
        length: number of sampled tokens.
        limit: length from which the penalty is whole.
        buffer: number of tokens below the limit over which it rises.
        penalty: the whole penalty.
        bounded: whether the penalty stays whole beyond the limit; if not, it keeps rising (NeMo RL).
    """
    share = max(0.0, length - (limit - buffer)) / buffer
    return -penalty * (min(share, 1.0) if bounded else share)
