"""Advantages: what a rollout's reward is worth next to the others of its group.  Pure Python, in float64.

An advantage function takes the groups of a step and returns, for each group, one float or None for each
rollout.  None masks the rollout: it is not trained and does not count.  A plugin offers more of them by
``grpo_advantages``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isfinite, sqrt
from typing import Literal

from grpo_core.records import Group

EQUAL = 1e-6
"""Rewards of a group that differ by less than this share of the largest are equal.

Float noise must not pass for a signal: divided by its own standard deviation it would be as loud as a real
difference.
"""

SMALLEST = 1e-150
"""Differences below this count as 0: their squares are 0 in float64."""


def group(
    groups: Sequence[Group],
    *,
    scale: Literal["group", "none"] = "group",
    leave_one_out: bool = False,
) -> list[list[float | None]]:
    """Compute advantages relative to the group's mean reward (GRPO); see ``normalize``.

    A rollout without a reward is masked.

    Args:
        groups: the groups of a step.
        scale: ``"group"`` divides by the standard deviation of the group's rewards, ``"none"`` does not.
        leave_one_out: compare each reward with the mean of the other rewards of its group.

    Raises ValueError for a reward that is not finite, or an unknown
    ``scale``.
    """
    result: list[list[float | None]] = []
    for each in groups:
        known = [reward for reward in each.rewards if reward is not None]
        scores = iter(normalize(known, scale=scale, leave_one_out=leave_one_out))
        result.append([None if reward is None else next(scores) for reward in each.rewards])
    return result


def normalize(
    rewards: Sequence[float], *, scale: Literal["group", "none"] = "group", leave_one_out: bool = False
) -> list[float]:
    """Compute the advantages of one group's rewards, relative to their mean (GRPO, arXiv 2402.03300 eq. 1).

    With n rewards r, mean m and sample standard deviation s (the sum of squares over n - 1)::

        advantage = (r - m)                  scale="none" (Dr. GRPO, arXiv 2503.20783)
        advantage = (r - m) / s              scale="group"; at most (n - 1) / sqrt(n) in magnitude

    ``leave_one_out`` takes the mean of the *other* rewards as the baseline (RLOO, arXiv 2402.14740), which
    is the same times n / (n - 1).  Equal rewards (see ``equal``) and a single reward have advantage 0.

    Args:
        rewards: rewards of the rollouts of one group.
        scale: ``"group"`` divides by the standard deviation of the group's rewards, ``"none"`` does not.
        leave_one_out: compare each reward with the mean of the other rewards of its group.

    Raises ValueError for a reward that is not finite, or an unknown ``scale``.
    """
    if scale not in ("group", "none"):
        raise ValueError(f"scale is {scale!r}; expected 'group' or 'none'")
    if not all(isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards are not finite: {list(rewards)}")
    n = len(rewards)
    if n < 2 or equal(rewards):
        return [0.0] * n
    mean = fsum(rewards) / n
    centred = [reward - mean for reward in rewards]
    factor = n / (n - 1) if leave_one_out else 1.0
    if scale == "group":
        factor /= sqrt(fsum(c * c for c in centred) / (n - 1))
    return [c * factor for c in centred]


def equal(rewards: Sequence[float], tolerance: float = 0.0) -> bool:
    """Return whether a group's rewards differ by no more than ``tolerance``, or than float noise (``EQUAL``).

    Metrics, dynamic sampling and advantages share this definition.
    """
    spread = max(rewards) - min(rewards)
    return spread <= max(tolerance, SMALLEST, EQUAL * max(map(abs, rewards)))
