"""Evidence that one environment pays for what another one refuses, which may be looked at at any time.

Each value is the share of a group's judged successes that the second environment refuses.  The hypothesis
is that this share is expected to be at most ``tolerance``, whatever came before.  Somebody bets against it:
their money is multiplied by ``1 + bet * (value - tolerance)``.  If the hypothesis is true, the money does not
grow on average, and the chance that it ever reaches ``1 / level`` is at most ``level`` (Ville's inequality;
Waudby-Smith and Ramdas 2024, as in ``grpo_core.validation.comparison``).  Some of the money waits and begins
to bet later, since exploits begin at an unknown time (Shin, Ramdas and Rinaldo 2024, "E-detectors").

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from attrs import define, field

STAKES = (0.03, 0.06, 0.12, 0.25, 0.5, 0.9)
"""Shares of the money that one bet may lose: small ones for small differences, large ones for large ones."""
MOST = 1e30
"""Largest sum that is counted: the alarm has long been given."""


@define
class Evidence:
    """The money of those who bet that more than a tolerated share is refused.

    Args:
        tolerance: largest expected share of the hypothesis, more than 0 and less than 1.
        level: largest chance of an alarm if the hypothesis is true.
    """

    tolerance: float
    level: float
    groups: int = 0
    """Number of values so far."""
    judged: int = 0
    """Number of rollouts that they stand for."""
    refused: int = 0
    alarmed: bool = False
    _money: list[float] = field(init=False, factory=lambda: [0.0] * len(STAKES))
    """The money of each stake that has begun to bet."""

    def add(self, refused: int, judged: int) -> bool:
        """Take the judgements of a group's rollouts; return whether this is the moment of the alarm."""
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
        """All of the money; it was 1 at the beginning."""
        return sum(self._money) + _waiting(self.groups)

    @property
    def share(self) -> float:
        """Share of the judged rollouts that were refused."""
        return self.refused / self.judged if self.judged else 0.0

    def state_dict(self) -> dict[str, Any]:
        names = ("tolerance", "level", "groups", "judged", "refused", "alarmed")
        return {**{name: getattr(self, name) for name in names}, "money": list(self._money)}

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go on with the evidence of a checkpoint; return False if it was about another hypothesis."""
        if (state["tolerance"], state["level"]) != (self.tolerance, self.level):
            return False
        if len(state["money"]) != len(STAKES):
            return False
        self.groups, self.judged, self.refused = state["groups"], state["judged"], state["refused"]
        self.alarmed, self._money = state["alarmed"], list(state["money"])
        return True


def _waiting(groups: int) -> float:
    """Return how much of the money has not begun to bet: it falls slowly, so that late exploits are found."""
    return 1 / math.log2(groups + 2)
