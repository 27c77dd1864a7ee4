"""Exact shares of tasks: the remainder of each task is carried over to the next request.  Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypedDict

from attrs import define, field

DIGITS = 6
"""Decimals by which tasks are compared, so that rounding does not separate equal debts."""


class SavedQuotas(TypedDict):
    """The state of ``Quotas``."""

    owed: dict[str, float]
    lost: list[tuple[str, int]]


@define
class Quotas:
    """Divides the prompts of requests among tasks by largest remainders.

    A task is owed its share of all prompts so far, minus the prompts it got.  It never gets a whole prompt
    too many, and it has exactly its share whenever the shares of all tasks are whole numbers.
    """

    owed: dict[str, float] = field(factory=dict)
    """Prompts owed by task; their sum is 0 between two requests, except for rounding."""
    lost: list[tuple[str, int]] = field(factory=list)
    """Task and target version of each prompt that another one of its task has to replace."""

    def divide(self, weights: Mapping[str, float], n: int, target: int = 0) -> list[str]:
        """Return the tasks of ``n`` prompts, mixed evenly; ``weights`` are at least 0, and not all 0.

        Prompts that were lost are replaced first, those for the step ``target`` before the others.  A task
        without a weight has no share, and its debt is dropped.
        """
        shares = {task: weight for task, weight in sorted(weights.items()) if weight > 0}
        lost = sorted((one for one in self.lost if one[0] in shares), key=lambda one: one[1] != target)
        counts = Counter(task for task, _ in lost[:n])
        self.lost = lost[n:]
        left = n - counts.total()
        owed = {task: self.owed.get(task, 0.0) for task in shares}
        missing = left - sum(owed.values())  # of removed tasks; otherwise their sum is 0
        total = sum(shares.values())
        owed = {task: owed[task] + missing * share / total for task, share in shares.items()}
        for _ in range(left):
            most = max(owed, key=lambda task: round(owed[task], DIGITS))
            owed[most] -= 1
            counts[most] += 1
        self.owed = owed
        return _mixed(counts)

    def state(self) -> SavedQuotas:
        """Return everything that decides the next requests."""
        return {"owed": self.owed, "lost": self.lost}

    @classmethod
    def of(cls, state: SavedQuotas) -> Quotas:
        return cls(owed=dict(state["owed"]), lost=[(task, target) for task, target in state["lost"]])


def _mixed(counts: Mapping[str, int]) -> list[str]:
    """Return each task as often as counted, spread so that every part of the list has about its share."""
    ordered: Sequence[tuple[float, str]] = sorted(
        ((i + 0.5) / count, task) for task, count in counts.items() for i in range(count)
    )
    return [task for _, task in ordered]
