"""Advantages: what a rollout's reward is worth next to the others of its group.  Pure Python, in float64.

An advantage function takes the rewards of a batch, group by group, and returns advantages of the same
shape; ``grpo_advantages`` of a plugin offers more of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum, isfinite, sqrt
from typing import Literal

EQUAL = 1e-6
"""Rewards of a group that differ by less than this share of the largest are equal.

Float noise must not pass for a signal: divided by its own standard deviation it would be as loud as a real
difference.
"""

SMALLEST = 1e-150
"""Differences below this are none: their squares are 0 in float64."""


def group(
    rewards: Sequence[Sequence[float]],
    *,
    scale: Literal["group", "none"] = "group",
    leave_one_out: bool = False,
) -> list[list[float]]:
    """Advantages relative to the group's mean (GRPO, arXiv 2402.03300 eq. 1).

    With n rewards r in a group, mean m and sample standard deviation s (the sum of squares over n - 1)::

        advantage = (r - m)                  scale="none" (Dr. GRPO, arXiv 2503.20783)
        advantage = (r - m) / s              scale="group"; at most (n - 1) / sqrt(n) in magnitude

    ``leave_one_out`` takes the mean of the *other* rewards as the baseline (RLOO, arXiv 2402.14740), which
    is the same times n / (n - 1).  Equal rewards (see ``EQUAL``) and groups of one have advantage 0.

    Args:
        rewards: of the rollouts of each group.
        scale: ``"group"`` divides by the standard deviation of the group's rewards, ``"none"`` does not.
        leave_one_out: compare each reward with the mean of the other rewards of its group.

    Raises ValueError for a reward that is not finite, or an unknown ``scale``.
    """
    if scale not in ("group", "none"):
        raise ValueError(f"advantage 'group': scale is {scale!r}; expected 'group' or 'none'")
    return [_one_group(list(each), i, scale == "group", leave_one_out) for i, each in enumerate(rewards)]


def equal(rewards: Sequence[float], tolerance: float = 0.0) -> bool:
    """Whether a group's rewards differ by no more than ``tolerance``, or than float noise (``EQUAL``)."""
    spread = max(rewards) - min(rewards)
    return spread <= max(tolerance, SMALLEST, EQUAL * max(map(abs, rewards)))


def _one_group(rewards: list[float], place: int, scaled: bool, leave_one_out: bool) -> list[float]:
    if not all(isfinite(reward) for reward in rewards):
        raise ValueError(f"advantage 'group': the rewards of group {place} are not finite: {rewards}")
    n = len(rewards)
    if n < 2 or equal(rewards):
        return [0.0] * n
    mean = fsum(rewards) / n
    centred = [reward - mean for reward in rewards]
    factor = n / (n - 1) if leave_one_out else 1.0
    if scaled:
        factor /= sqrt(fsum(c * c for c in centred) / (n - 1))
    return [c * factor for c in centred]
