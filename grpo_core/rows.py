"""From groups to the rows that a step trains.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_core.errors import EngineError, PluginError
from grpo_core.protocols import AdvantageFunction
from grpo_core.records import Batch, Group, Row
from grpo_core.tokens import sampled_versions


def make_batch(
    groups: Sequence[Group], *, step: int, temperature: float, advantages: AdvantageFunction
) -> Batch:
    """One row for each rollout that has something to teach.

    Rollouts whose advantage is 0 (all of a group with equal rewards) are left out: they have no policy
    gradient, and they do not count in the loss's average either (as in DAPO, arXiv 2503.14476, section 3.2,
    but without refilling the batch).  Raises PluginError if the advantages have not the rewards' shape.
    """
    rewards = [[float(reward) for reward in group.rewards if reward is not None] for group in groups]
    scores = advantages(rewards)
    if [len(row) for row in scores] != [len(row) for row in rewards]:
        raise PluginError(
            f"advantage function {getattr(advantages, '__name__', advantages)!r}: returned groups of sizes "
            f"{[len(row) for row in scores]}, expected {[len(row) for row in rewards]}"
        )
    rows = tuple(
        Row(
            prompt_ids=rollout.prompt_ids,
            tokens=rollout.tokens,
            advantage=advantage,
            group=place,
        )
        for place, (group, row) in enumerate(zip(groups, scores, strict=True))
        for rollout, advantage in zip(group.rollouts, row, strict=True)
        if advantage != 0.0 and rollout.tokens.n_sampled
    )
    return Batch(step=step, rows=rows, temperature=temperature)


def check_staleness(groups: Sequence[Group], *, step: int, max_staleness: int) -> None:
    """Raises EngineError if a token was sampled by weights that the buffer cannot have allowed.

    The buffer bounds the staleness by construction; what this finds is an engine that does not hold the
    weights that it said it holds.
    """
    oldest = step - max_staleness
    for group in groups:
        versions = sampled_versions([rollout.tokens for rollout in group.rollouts])
        wrong = versions[(versions < oldest) | (versions > step)]
        if wrong.size:
            raise EngineError(
                f"engine: prompt {group.prompt.id!r} came back with tokens of version {wrong.min()} for "
                f"step {step}; expected versions {oldest} to {step}"
            )
