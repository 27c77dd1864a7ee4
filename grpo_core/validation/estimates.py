"""Estimates from validation rollouts: pass@k, the majority's choice, bootstrap intervals.

Functions of numbers; whatever is random has a seed.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean

from attrs import frozen

RESAMPLES = 1000
"""Of a bootstrap: enough for two digits of a 95 % interval."""


@frozen
class Interval:
    """Where a mean would lie if the prompts had been others of the same kind."""

    low: float
    high: float


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that at least one of ``k`` rollouts is correct, given ``correct`` of ``n``.

    ``1 - C(n - correct, k) / C(n, k)``, which is unbiased for every ``n >= k`` (Chen et al. 2021, "Evaluating
    large language models trained on code", equation 1); ``1 - (1 - correct / n) ** k`` is not.

    Raises ValueError unless ``0 <= correct <= n`` and ``1 <= k <= n``.
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {correct} correct in {n}: expected 0 <= correct <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority(votes: Sequence[tuple[Hashable, float]]) -> float:
    """The value of the answer with the most votes: the mean of its votes' values.

    A tie is worth the mean over the answers that share it: what drawing one of them comes to in the long run,
    without a draw and without regard to the order of the votes (Wang et al. 2022, "Self-consistency", leaves
    ties open).

    Args:
        votes: ``(answer, value)`` of each rollout; at least one.
    """
    values: dict[Hashable, list[float]] = {}
    for answer, value in votes:
        values.setdefault(answer, []).append(value)
    most = max(map(len, values.values()))
    return fmean(fmean(those) for those in values.values() if len(those) == most)


def interval(
    values: Sequence[float], *, seed: int, confidence: float = 0.95, resamples: int = RESAMPLES
) -> Interval:
    """Percentile bootstrap of the mean (Efron 1979): the same for the same values, in any order, and seed.

    Equal values have an interval of no width; it says that these prompts are alike, not that all are.

    Args:
        values: one for each independent unit, which is a prompt and not a rollout; at least one.
        seed: of the resampling.
        confidence: share of the resampled means that lie within.
        resamples: drawn with replacement, each as large as ``values``.
    """
    import numpy as np

    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    # Drawing n of n values with replacement draws so many of each distinct one.
    drawn = np.random.default_rng(seed).multinomial(len(values), counts / len(values), size=resamples)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(drawn @ distinct / len(values), [tail, 1.0 - tail])
    return Interval(float(low), float(high))


def with_interval(
    name: str, values: Sequence[float], *, seed: int, confidence: float = 0.95
) -> Mapping[str, float]:
    """``{name: mean, name_low: ..., name_high: ...}``; nothing if there are no values."""
    if not values:
        return {}
    mean = fmean(values)
    bounds = interval(values, seed=seed, confidence=confidence)
    return {name: mean, f"{name}_low": min(bounds.low, mean), f"{name}_high": max(bounds.high, mean)}
