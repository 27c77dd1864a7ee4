"""A sequential test of whether a second environment refuses too many successes; valid at any time.

Each value is the share of a group's judged successes that the second environment refuses.  The null
hypothesis is that the conditional expectation of this share is at most ``tolerance``.  A bet against it
multiplies a wealth by ``1 + bet * (value - tolerance)``.  Under the hypothesis the wealth does not grow on
average, and the probability that it ever reaches ``1 / level`` is at most ``level`` (Ville's inequality;
Waudby-Smith and Ramdas 2024, "Estimating means of bounded random variables by betting").  Part of the wealth
starts to bet later, because exploits begin at an unknown time (Shin, Ramdas and Rinaldo 2024, "E-detectors").

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attrs import define, field

STAKES = (0.03, 0.06, 0.12, 0.25, 0.5, 0.9)
"""Fractions of the wealth that a bet risks; small ones detect small differences, large ones large ones."""
MOST = 1e30
"""Cap of the wealth, far above any alarm; it prevents overflow."""


@define
class Evidence:
    """The wealth of bets that more than the tolerated share is refused.

    Args:
        tolerance: largest expected share under the hypothesis, between 0 and 1, exclusive.
        level: largest probability of a false alarm.
    """

    tolerance: float
    level: float
    groups: int = 0
    """Number of groups so far."""
    judged: int = 0
    """Number of judged rollouts of these groups."""
    refused: int = 0
    alarmed: bool = False
    _money: list[float] = field(init=False, factory=lambda: [0.0] * len(STAKES))
    """Wealth of each stake, without the part that still waits."""

    def add(self, refused: int, judged: int) -> bool:
        """Add the judgements of a group's rollouts; return whether they raise the alarm."""
        gain = refused / judged - self.tolerance
        begins = (_waiting(self.groups) - _waiting(self.groups + 1)) / len(STAKES)
        self._money = [
            min(MOST, (money + begins) * (1 + stake / self.tolerance * gain))
            for money, stake in zip(self._money, STAKES, strict=True)
        ]
        self.groups, self.judged, self.refused = self.groups + 1, self.judged + judged, self.refused + refused
        first = not self.alarmed and self.money >= 1 / self.level
        self.alarmed = self.alarmed or first
        return first

    @property
    def money(self) -> float:
        """Total wealth, 1 at the start."""
        return sum(self._money) + _waiting(self.groups)

    @property
    def share(self) -> float:
        """Share of refused rollouts among the judged ones."""
        return self.refused / self.judged if self.judged else 0.0

    def state_dict(self) -> dict[str, Any]:
        names = ("tolerance", "level", "groups", "judged", "refused", "alarmed")
        return {**{name: getattr(self, name) for name in names}, "money": list(self._money)}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Restore the evidence of a checkpoint; return False if it tested another hypothesis."""
        if (state["tolerance"], state["level"]) != (self.tolerance, self.level):
            return False
        if len(state["money"]) != len(STAKES):
            return False
        self.groups, self.judged, self.refused = state["groups"], state["judged"], state["refused"]
        self.alarmed, self._money = state["alarmed"], list(state["money"])
        return True


def _waiting(groups: int) -> float:
    """Return the wealth that has not started to bet; it falls slowly, so that late exploits are found."""
    return 1 / math.log2(groups + 2)
