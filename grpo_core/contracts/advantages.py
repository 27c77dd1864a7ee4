"""Advantage formulas.  Pure Python, in float64.

Each function takes plain numbers: the rewards of the rollouts of one group, or of all groups of a step, as
lists.  A reward of None is left out of means, and its advantage is None.  Equal rewards (see ``equal``)
have advantage 0 exactly.  ``grpo_core.loop.rows`` offers the same formulas to the configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import fsum, isfinite, sqrt
from typing import Literal

Rewards = Sequence["float | None"]
"""Rewards of one group, or numbers that stand for them."""
Scale = Literal["group", "batch", "others", "none"]
"""Rewards whose standard deviation divides the differences: the group's, all of the step, or the others of
the group; ``"none"`` does not divide."""

EQUAL = 1e-6
"""Rewards of a group that differ by less than this share of the largest are equal.

Float noise must not count as a signal: divided by its standard deviation, it would be as large as a real
difference.
"""

SMALLEST = 1e-150
"""Differences below this count as 0: their squares are 0 in float64."""


def equal(rewards: Sequence[float], tolerance: float = 0.0) -> bool:
    """Return whether a group's rewards differ at most by ``tolerance`` or float noise (``EQUAL``).

    Metrics, filters and advantages share this definition.  An empty list counts as equal.
    """
    if not rewards:
        return True
    spread = max(rewards) - min(rewards)
    return spread <= max(tolerance, SMALLEST, EQUAL * max(map(abs, rewards)))


def reaches(reward: float, threshold: float, terms: Sequence[float] = ()) -> bool:
    """Return whether a reward is at least a threshold, or equal to it (see ``equal``).

    Ten rewards of 0.1 add up to 0.9999999999999999 and reach 1.

    Args:
        terms: what the reward is the sum of, if it is known: noise is relative to the largest.
    """
    largest = max(map(abs, (reward, threshold, *terms)))
    return reward >= threshold or threshold - reward <= max(SMALLEST, EQUAL * largest)


# ---------------------------------------------------------------------------------- relative to the group


def group(
    rewards: Sequence[Rewards],
    *,
    scale: Scale = "group",
    leave_one_out: bool = False,
    ddof: int = 1,
    epsilon: float = 0.0,
) -> list[list[float | None]]:
    """Compute the advantages of all groups of a step; see ``normalize``.

    ``scale="batch"`` divides each group's differences from its mean by the standard deviation of all rewards
    of the step (Lite PPO, arXiv 2508.08221).

    Args:
        rewards: rewards of each group.
        scale: what the differences are divided by; see ``Scale``.
        leave_one_out: compare each reward with the mean of the other rewards of its group.
        ddof: the variance is the sum of squares over n - ``ddof``.
        epsilon: is added to the standard deviation.
    """
    check_ranges(scale=scale, ddof=ddof, epsilon=epsilon)
    if scale != "batch":
        one = partial(normalize, scale=scale, leave_one_out=leave_one_out, ddof=ddof, epsilon=epsilon)
        return [of_known(one, each) for each in rewards]
    centred = [
        of_known(lambda known: normalize(known, scale="none", leave_one_out=leave_one_out), each)
        for each in rewards
    ]
    everything = [value for row in rewards for value in row if value is not None]
    if len(everything) <= ddof or equal(everything):
        return [[None if value is None else 0.0 for value in row] for row in centred]
    divisor = deviation(everything, ddof) + epsilon
    return [[None if value is None else value / divisor for value in row] for row in centred]


def normalize(
    rewards: Sequence[float],
    *,
    scale: Literal["group", "others", "none"] = "group",
    leave_one_out: bool = False,
    ddof: int = 1,
    epsilon: float = 0.0,
) -> list[float]:
    """Compute the advantages of one group's rewards, relative to their mean (GRPO, arXiv 2402.03300 eq. 1).

    With n rewards r, mean m and standard deviation s (the sum of squares over n - ``ddof``)::

        advantage = (r - m)                  scale="none" (Dr. GRPO, arXiv 2503.20783)
        advantage = (r - m) / (s + epsilon)  scale="group"; at most (n - 1) / sqrt(n) in magnitude

    ``leave_one_out`` takes the mean of the *other* rewards as the baseline (RLOO, arXiv 2402.14740), which
    is the same times n / (n - 1).  ``scale="others"`` divides by the standard deviation of the other rewards,
    too, unless these are equal: then the difference stays as it is.  Equal rewards (see ``equal``) and a
    single reward have advantage 0.

    Args:
        rewards: rewards of the rollouts of one group.
        scale: what the differences are divided by; see ``Scale``.
        leave_one_out: compare each reward with the mean of the other rewards of its group.
        ddof: 1 for the sample's standard deviation, 0 for the population's.
        epsilon: is added to the standard deviation.

    Raises ValueError for a reward that is not finite, or an option out of range.
    """
    if scale not in ("group", "others", "none"):
        raise ValueError(f"scale is {scale!r}; expected 'group' or 'others' or 'none'")
    check_ranges(ddof=ddof, epsilon=epsilon)
    if not all(isfinite(reward) for reward in rewards):
        raise ValueError(f"rewards are not finite: {list(rewards)}")
    n = len(rewards)
    if n < 2 or equal(rewards):
        return [0.0] * n
    mean = fsum(rewards) / n
    centred = [reward - mean for reward in rewards]
    factor = n / (n - 1) if leave_one_out else 1.0
    if scale == "others":
        return [c * factor / _others(rewards, i, ddof, epsilon) for i, c in enumerate(centred)]
    if scale == "group":
        factor /= sqrt(fsum(c * c for c in centred) / (n - ddof)) + epsilon
    return [c * factor for c in centred]


def _others(rewards: Sequence[float], place: int, ddof: int, epsilon: float) -> float:
    """Return what a reward's difference is divided by: the others' deviation, or 1 if they are equal."""
    others = [*rewards[:place], *rewards[place + 1 :]]
    if len(others) <= ddof or equal(others):
        return 1.0
    return deviation(others, ddof) + epsilon


def combine(parts: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    """Return the weighted sum of parts; parts that are None are skipped.  None if no part is left.

    Args:
        parts: numbers by name.
        weights: weight of each part that counts.
    """
    known = [(value, weight) for name, weight in weights.items() if (value := parts.get(name)) is not None]
    return fsum(value * weight for value, weight in known) if known else None


def clipped(value: float, low: float | None, high: float | None) -> float:
    """Return the nearest number within [``low``, ``high``]."""
    value = value if low is None else max(value, low)
    return value if high is None else min(value, high)


# ---------------------------------------------------------------------------------- helpers


def deviation(values: Sequence[float], ddof: int = 1) -> float:
    """Return the standard deviation: the root of the sum of squares over n - ``ddof``."""
    mean = fsum(values) / len(values)
    return sqrt(fsum((value - mean) ** 2 for value in values) / (len(values) - ddof))


def check_ranges(
    *,
    scale: str = "group",
    ddof: int = 1,
    epsilon: float = 0.0,
    batch_epsilon: float = 0.0,
    floor: float = 0.0,
    discount: float = 1.0,
) -> None:
    """Raise ValueError for an option that is out of range."""
    if scale not in ("group", "batch", "others", "none"):
        raise ValueError(f"scale is {scale!r}; expected 'group', 'batch', 'others' or 'none'")
    if ddof not in (0, 1):
        raise ValueError(f"ddof is {ddof}; expected 0 or 1")
    for name, value in (("epsilon", epsilon), ("batch_epsilon", batch_epsilon), ("floor", floor)):
        if not 0 <= value < float("inf"):
            raise ValueError(f"{name} is {value}; expected a finite number >= 0")
    if not 0 <= discount <= 1:
        raise ValueError(f"discount is {discount}; expected 0 to 1")


def of_known(function: Callable[[Sequence[float]], Sequence[float]], values: Rewards) -> list[float | None]:
    """Apply a function to the numbers that are known; the others stay None."""
    known = iter(function([value for value in values if value is not None]))
    return [None if value is None else next(known) for value in values]
