"""From groups to the rows that a step trains.  Pure."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_core.errors import EngineError, PluginError
from grpo_core.protocols import AdvantageFunction
from grpo_core.records import Batch, Group, Row


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
            token_ids=rollout.token_ids,
            sampled=rollout.sampled,
            logprobs=rollout.logprobs,
            versions=rollout.versions,
            advantage=advantage,
            group=place,
        )
        for place, (group, row) in enumerate(zip(groups, scores, strict=True))
        for rollout, advantage in zip(group.rollouts, row, strict=True)
        if advantage != 0.0 and any(rollout.sampled)
    )
    return Batch(step=step, rows=rows, temperature=temperature)


def check_staleness(groups: Sequence[Group], *, step: int, max_staleness: int) -> None:
    """Raises EngineError if a token was sampled by weights that the buffer cannot have allowed.

    The buffer bounds the staleness by construction; what this finds is an engine that does not hold the
    weights that it said it holds.
    """
    allowed = range(step - max_staleness, step + 1)
    for group in groups:
        for rollout in group.rollouts:
            wrong = {v for v, sampled in zip(rollout.versions, rollout.sampled, strict=True) if sampled} - {
                *allowed
            }
            if wrong:
                raise EngineError(
                    f"engine: prompt {group.prompt.id!r} came back with tokens of version {min(wrong)} for "
                    f"step {step}; expected versions {allowed.start} to {step}"
                )
