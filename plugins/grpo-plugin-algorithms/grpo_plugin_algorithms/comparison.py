"""Compares two versions on the same prompts, with statistics that may be looked at after every prompt.

The difference of a prompt is its score by one version minus its score by the other.  A *confidence sequence*
is an interval for the mean difference that covers it at all times at once, with a given probability: whoever
looks after each prompt and stops at will is wrong no more often than whoever looks once.  This one bets
against each possible mean (Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by
betting", section 4.3): a mean is ruled out when a bet against it would have multiplied its stake by
1 / (1 - confidence).

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from numpy.typing import NDArray

GRID = 401
"""Number of means that are bet against: the interval is exact to half a percent of the range."""

STAKE = 0.5
"""Largest share of the money that one bet may lose, which keeps the money positive."""

Decision = Literal["better", "worse", "equal"]


class Comparison:
    """Collects the differences of prompts, in any order that does not depend on the scores.

    Args:
        bound: no difference is larger than this in size; 1 for scores between 0 and 1.
        confidence: probability that the interval covers the mean difference, at all times at once.
        effect: a difference that matters, for which decisions are fastest.
        margin: versions whose difference is certainly smaller than this are equal.  0: never.

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
        self._limit = float(np.log(2 / (1 - confidence)))  # each of the two bettors has half of the stake
        self.n = 0
        """Number of differences so far."""
        self._sum = self._squares = 0.0
        self._means: NDArray[np.float64] = np.linspace(0.0, 1.0, GRID)
        self._logs = np.zeros((2, GRID))
        """Logarithm of the money of who bets that the mean is larger, and of who bets that it is smaller."""
        self._out = np.zeros(GRID, bool)
        """Means that were ruled out once; they stay out."""

    def add(self, differences: Iterable[float]) -> None:
        """Take more differences.  Raises ValueError if one exceeds the bound."""
        for difference in differences:
            x = (difference / self.bound + 1) / 2
            if not 0 <= x <= 1:
                raise ValueError(f"a difference of {difference}; expected at most {self.bound} in size")
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
        """Return the size of the next bet, which may depend on earlier differences only.

        A bet of effect / variance multiplies the money fastest if the effect is the true difference.  Later
        than a decision may be expected, bets become smaller, so that the interval goes on to shrink.
        """
        variance = (0.25 + self._squares) / (self.n + 1)
        effect = self.effect / self.bound / 2
        late = 4 * 2 * self._limit * variance / effect**2
        return float(effect / variance * min(1.0, np.sqrt(late / (self.n + 1))))

    @property
    def mean(self) -> float:
        """Mean difference so far; 0 without any."""
        return self.bound * (2 * self._sum / self.n - 1) if self.n else 0.0

    @property
    def interval(self) -> tuple[float, float]:
        """Smallest and largest mean difference that is not ruled out."""
        left = self._means[~self._out]
        if not left.size:  # fewer than 1 - confidence of all sequences come here
            return self.mean, self.mean
        step = 1 / (GRID - 1)
        low, high = max(left[0] - step, 0.0), min(left[-1] + step, 1.0)
        return self.bound * (2 * low - 1), self.bound * (2 * high - 1)

    @property
    def decision(self) -> Decision | None:
        """Whether the one version is better or worse than the other, or equal; None is undecided."""
        return decided(self.interval, self.margin)


def decided(interval: tuple[float, float], margin: float) -> Decision | None:
    """Return the decision to which an interval of the difference, and a margin of equality, come."""
    low, high = interval
    if margin and -margin < low and high < margin:
        return "equal"
    return "better" if low > 0 else "worse" if high < 0 else None
