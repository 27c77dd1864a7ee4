"""An advantage function in a file: masks truncated rollouts, and prefers short right replies.

grpo-core train --env math:sort --set advantage.name=./examples/custom_advantage.py:concise
"""

from collections.abc import Sequence
from statistics import fmean

import grpo_core as grpo


def concise(groups: Sequence[grpo.Group], *, price: float = 0.001) -> list[list[float | None]]:
    """Compute how much a rollout's reward - price x tokens exceeds the mean of its group.

    None masks a rollout that a limit has cut off.  The advantages are not divided by the standard deviation
    (Dr. GRPO), which would make the price count most where all replies are right.

    Args:
        groups: the groups of a step.
        price: reward that a sampled token of a rewarded rollout costs.
    """
    return [score(group, price) for group in groups]


def score(group: grpo.Group, price: float) -> list[float | None]:
    values = [
        value(rollout, price) if rollout.finish_reason == "stop" else None for rollout in group.rollouts
    ]
    whole = [each for each in values if each is not None]
    mean = fmean(whole) if whole else 0.0
    return [None if each is None else each - mean for each in values]


def value(rollout: grpo.Rollout, price: float) -> float:
    reward = rollout.reward or 0.0
    return reward - price * rollout.n_sampled if reward > 0 else reward


@grpo.hookimpl
def grpo_advantages() -> dict[str, object]:
    return {"concise": concise}
