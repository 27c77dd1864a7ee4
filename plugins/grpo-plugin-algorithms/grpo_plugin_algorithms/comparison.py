"""Compares two versions on the same prompts, with an interval that is valid after every prompt.

The difference of a prompt is its score with one version minus its score with the other.  A *confidence
sequence* is a sequence of intervals that all cover the mean difference, at every sample size at once, with a
given probability.  Stopping at any time is therefore valid.  This one is built from bets against each
possible mean (Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting",
section 4.3): a mean is excluded when a bet against it would have multiplied its stake by
1 / (1 - confidence).

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

GRID = 401
"""Number of candidate means: the interval is exact to half a percent of the range."""

STAKE = 0.5
"""Largest fraction of the wealth that one bet may lose, which keeps the wealth positive."""

Decision = Literal["better", "worse", "equal"]


class Comparison:
    """The confidence sequence of the mean difference; prompts come in an order independent of their scores.

    Args:
        bound: largest absolute difference of a prompt; 1 for scores between 0 and 1.
        confidence: probability that all intervals cover the mean difference.
        effect: size of a relevant difference, for which decisions are fastest.
        margin: versions are equal if the interval is within this distance of 0.  0: never.

    Raises ValueError if a number is out of its range.
    """

    def __init__(
        self, *, bound: float = 1.0, confidence: float = 0.95, effect: float = 0.05, margin: float = 0.0
    ) -> None:
        if not (bound > 0 and 0 < confidence < 1 and 0 < effect <= bound and margin >= 0):
            raise ValueError(
                f"bound {bound}, confidence {confidence}, effect {effect}, margin {margin}; expected "
                "bound > 0, 0 < confidence < 1, 0 < effect <= bound, margin >= 0"
            )
        self.bound, self.confidence, self.effect, self.margin = bound, confidence, effect, margin
        self._limit = float(np.log(2 / (1 - confidence)))  # half of the stake for each of the two sides
        self.n = 0
        """Number of differences added so far."""
        self._sum = self._squares = 0.0
        self._means: NDArray[np.float64] = np.linspace(0.0, 1.0, GRID)
        self._logs = np.zeros((2, GRID))
        """Log wealth of the bets that the mean is larger (row 0) and smaller (row 1) than each candidate."""
        self._out = np.zeros(GRID, bool)
        """Whether each candidate mean was excluded; an excluded mean stays excluded."""

    def add(self, differences: Iterable[float]) -> None:
        """Add differences.  Raises ValueError if one exceeds the bound."""
        for difference in differences:
            x = (difference / self.bound + 1) / 2
            if not 0 <= x <= 1:
                raise ValueError(f"difference {difference} exceeds the bound {self.bound}")
            bet = self._bet()
            gains = x - self._means
            with np.errstate(divide="ignore"):
                up = np.minimum(bet, STAKE / self._means)
                down = np.minimum(bet, STAKE / (1 - self._means))
            self._logs[0] += np.log1p(up * gains)
            self._logs[1] += np.log1p(-down * gains)
            self._out |= self._logs.max(axis=0) >= self._limit
            self.n += 1
            self._sum += x
            self._squares += (x - (0.5 + self._sum) / (self.n + 1)) ** 2

    def _bet(self) -> float:
        """Return the size of the next bet, which depends on earlier differences only.

        A bet of effect / variance maximises the growth of the wealth if the effect is the true difference.
        After the expected time of a decision the bets become smaller, so that the interval keeps shrinking.
        """
        variance = (0.25 + self._squares) / (self.n + 1)
        effect = self.effect / self.bound / 2
        late = 4 * 2 * self._limit * variance / effect**2
        return float(effect / variance * min(1.0, np.sqrt(late / (self.n + 1))))

    @property
    def mean(self) -> float:
        """Mean difference so far; 0 without data."""
        return self.bound * (2 * self._sum / self.n - 1) if self.n else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Smallest and largest mean difference that is not excluded."""
        left = self._means[~self._out]
        if not left.size:  # happens with probability below 1 - confidence
            return self.mean, self.mean
        step = 1 / (GRID - 1)
        low, high = max(left[0] - step, 0.0), min(left[-1] + step, 1.0)
        return self.bound * (2 * low - 1), self.bound * (2 * high - 1)

    @property
    def decision(self) -> Decision | None:
        """The result for the first version: better, worse or equal; None while undecided."""
        return decided(self.interval, self.margin)


def decided(interval: tuple[float, float], margin: float) -> Decision | None:
    """Return the decision that follows from the interval of a difference and the margin of equality."""
    low, high = interval
    if margin and -margin < low and high < margin:
        return "equal"
    return "better" if low > 0 else "worse" if high < 0 else None
