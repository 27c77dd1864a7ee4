"""Filters of groups by their success rate and by their length.  Pure."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from grpo_core import Group, advantages


def check_pass_rate(*, group_size: int, low: float = 0.0, high: float = 1.0, **options: Any) -> None:
    if not 0 <= low <= high <= 1:
        raise ValueError(f"low is {low} and high is {high}; expected 0 <= low <= high <= 1")


def pass_rate(
    group: Group, *, low: float = 0.0, high: float = 1.0, success: float | None = None
) -> str | None:
    """Drop a group whose success rate is outside of a band.

    A group below it is trained if the loss learns from hints of its rollouts.

    Args:
        group: a finished group.
        low: smallest success rate that is trained.
        high: largest success rate that is trained.
        success: reward from which a rollout is a success.  None: the task's own success, or a reward of 1 if
            it declares none.
    """
    done = group.successes(success)
    if not done:
        return "none of its rollouts has a reward"
    rate = fmean(done)
    if not advantages.reaches(rate, low) and not any(rollout.hint_ids for rollout in group.rollouts):
        return f"its pass rate {rate:.3g} is below {low:g}"
    return None if advantages.reaches(high, rate) else f"its pass rate {rate:.3g} is above {high:g}"


def check_mean_length(*, group_size: int, shortest: float = 0.0, longest: float = 0.0) -> None:
    if shortest < 0 or longest < 0 or (longest and longest < shortest):
        raise ValueError(
            f"shortest is {shortest} and longest is {longest}; expected 0 <= shortest <= longest, where 0 is "
            "no limit"
        )


def mean_length(group: Group, *, shortest: float = 0.0, longest: float = 0.0) -> str | None:
    """Drop a group whose mean number of sampled tokens is outside of a range.

    Args:
        group: a finished group.
        shortest: smallest mean that is trained.
        longest: largest mean that is trained; 0 sets no limit.
    """
    mean = fmean(rollout.n_sampled for rollout in group.rollouts)
    if mean < shortest:
        return f"its rollouts have {mean:.1f} sampled tokens on average, fewer than {shortest:g}"
    if longest and mean > longest:
        return f"its rollouts have {mean:.1f} sampled tokens on average, more than {longest:g}"
    return None
