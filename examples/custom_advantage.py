"""An advantage function in a file: leave out what was cut off, and prefer short replies among the right ones.

grpo-core train --env math:sort --set advantage.name=./examples/custom_advantage.py:concise
"""

from collections.abc import Sequence

import grpo_core as grpo
from grpo_core.advantages import normalize


def concise(groups: Sequence[grpo.Group], *, price: float = 0.001) -> list[list[float | None]]:
    """GRPO's advantages of reward - price x tokens; None masks a rollout that a limit has cut off.

    Args:
        groups: the groups of a step.
        price: reward that a sampled token of a rewarded rollout costs.
    """
    return [score(group, price) for group in groups]


def score(group: grpo.Group, price: float) -> list[float | None]:
    whole = [rollout for rollout in group.rollouts if rollout.finish_reason == "stop"]
    values = iter(normalize([value(rollout, price) for rollout in whole]))
    return [next(values) if rollout.finish_reason == "stop" else None for rollout in group.rollouts]


def value(rollout: grpo.Rollout, price: float) -> float:
    reward = rollout.reward or 0.0
    return reward - price * rollout.tokens.n_sampled if reward > 0 else reward


@grpo.hookimpl
def grpo_advantages() -> dict[str, object]:
    return {"concise": concise}
