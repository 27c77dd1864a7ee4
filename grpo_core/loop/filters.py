"""The default filter of groups.  Pure.

A filter is a function of a finished group and its options.  It returns why the group shall not be trained, or
None.  Filters see rewards as the environment gave them.  A plugin offers more of them by ``grpo_filters``.
"""

from __future__ import annotations

from grpo_core.loop.advantages import equal
from grpo_core.records import Group


def check_equal_rewards(*, group_size: int, tolerance: float = 0.0) -> None:
    if tolerance < 0:
        raise ValueError(f"tolerance is {tolerance}; expected 0 or more")


def equal_rewards(group: Group, *, tolerance: float = 0.0) -> str | None:
    """Filter a group whose rewards are all equal: it has no advantages (DAPO, arXiv 2503.14476).

    Args:
        group: a finished group.
        tolerance: rewards that differ by no more than this are equal.
    """
    rewards = [reward for reward in group.rewards if reward is not None]
    return "its rewards are equal" if equal(rewards, tolerance) else None
