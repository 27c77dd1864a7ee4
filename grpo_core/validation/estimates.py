"""Bootstrap intervals of means.  Pure; the random functions take a seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

MANY = 0.05
"""Missing scores that could move a measurement by more than this leave it without a value."""
RESAMPLES = 1000
"""Number of bootstrap resamples: enough for two digits of a 95 % interval."""


def interval(
    values: Sequence[float], *, seed: int, confidence: float = 0.95, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Return the ends of the percentile bootstrap interval of the mean (Efron 1979).

    The result depends on the values, not on their order, and on the seed.  Equal values give an interval of
    zero width: these prompts are alike, but others may differ.

    Args:
        values: one value for each independent unit (a prompt, not a rollout); at least one.
        seed: seed of the resampling.
        confidence: share of the resampled means inside the interval.
        resamples: number of resamples, each as large as ``values``.
    """
    import numpy as np

    distinct, counts = np.unique(np.asarray(values, dtype=np.float64), return_counts=True)
    # A resample of n values is a multinomial draw over the distinct values.
    drawn = np.random.default_rng(seed).multinomial(len(values), counts / len(values), size=resamples)
    tail = (1.0 - confidence) / 2.0
    low, high = np.quantile(drawn @ distinct / len(values), [tail, 1.0 - tail])
    return float(low), float(high)


def mean_with_interval(
    name: str,
    values: Sequence[float],
    *,
    seed: int,
    confidence: float = 0.95,
    lows: Sequence[float] = (),
    highs: Sequence[float] = (),
    limit: float = MANY,
) -> Mapping[str, float]:
    """Return ``{name: mean, name_low: ..., name_high: ...}``, or ``{}`` if there are no values.

    If scores are missing, the interval holds for any values of them, and there is no mean if they could move
    it by more than ``limit``: scores are not missing at random.

    Args:
        name: of the measurement.
        values: one value for each independent unit (a prompt, not a rollout) whose score is known.
        seed: seed of the resampling.
        confidence: share of the resampled means inside the interval.
        lows: value of every unit, if each missing score is the worst; empty if none is missing.
        highs: value of every unit, if each missing score is the best.
        limit: largest shift of the mean by missing scores.
    """
    if not (values or lows):
        return {}
    lows, highs = lows or values, highs or values
    least, most = fmean(lows), fmean(highs)
    low = interval(lows, seed=seed, confidence=confidence)[0]
    high = interval(highs, seed=seed, confidence=confidence)[1]
    ends = {f"{name}_low": min(low, least), f"{name}_high": max(high, most)}
    if not values or most - least > limit:
        return ends
    return {name: min(max(fmean(values), least), most), **ends}
