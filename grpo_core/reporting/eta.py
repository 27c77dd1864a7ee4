"""How long a run will go on, as an interval, from the seconds of its steps so far.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from statistics import NormalDist, fmean

from attrs import frozen

WARM_UP = 2
"""Steps at the beginning that do not count: the pipeline fills, and the parts warm up."""
FEWEST = 6
"""Steps after them without which there is no interval."""
RECENT = 0.6
"""Share of the steps, the newest ones, that count: completions get longer or shorter as the model learns."""
DRIFT = 0.04
"""Standard deviation of the steps' mean over the rest of a long run, as a share of the mean so far."""
MOST = 300
"""Largest number of steps that count: the work grows with its square."""
CONFIDENCE = 0.8
"""Share of the intervals that shall contain the time that the run then takes."""


@frozen
class Remaining:
    """The seconds until a run ends."""

    expected: float
    low: float
    high: float


def remaining(seconds: Sequence[float], left: int) -> Remaining | None:
    """Forecast the seconds of the ``left`` steps that follow; None if there are too few steps yet.

    Args:
        seconds: of each step so far, from the end of the one before, in order; with all that happens between
            two steps, such as validations and checkpoints.
        left: number of steps that follow.

    Steps are not independent: a long one is often followed by a short one, which found its groups ready, and
    every tenth may have a validation.  The variance of their sum is therefore that of sums of neighbours, by
    Bartlett's kernel (Newey and West, 1987).  The mean itself is uncertain, too, so the variance of a sum of
    ``left`` steps after ``n`` seen ones is ``left + left**2 / n`` times that of a step.  And completions get
    longer or shorter, the more so the more steps follow.
    """
    steady = seconds[WARM_UP:]
    if len(steady) < FEWEST or left < 1:
        return None
    newest = steady[-min(MOST, max(FEWEST, round(RECENT * len(steady)))) :]
    n, mean = len(newest), fmean(newest)
    variance = _long_run_variance([value - mean for value in newest])
    drift = DRIFT * mean * left * left / (left + len(seconds))
    spread = _quantile((1 + CONFIDENCE) / 2, n - 1) * sqrt(variance * (left + left * left / n) + drift**2)
    expected = mean * left
    return Remaining(expected, max(expected - spread, min(newest) * left), expected + spread)


def _long_run_variance(deviations: Sequence[float]) -> float:
    n = len(deviations)
    lags = max(1, n // 6)

    def covariance(lag: int) -> float:
        return sum(a * b for a, b in zip(deviations, deviations[lag:], strict=False)) / (n - 1)

    own = covariance(0)
    whole = own + 2 * sum((1 - lag / (lags + 1)) * covariance(lag) for lag in range(1, lags + 1))
    return max(whole, own / 4)  # few steps may look as if each made up for the one before


def _quantile(share: float, freedom: int) -> float:
    """Return a quantile of Student's distribution (Cornish and Fisher's expansion; Hill, 1970)."""
    z = NormalDist().inv_cdf(share)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
