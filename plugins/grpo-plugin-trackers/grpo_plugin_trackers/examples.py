"""Rollouts as rows of a table."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import grpo_core as grpo

COLUMNS = ("step", "task", "prompt", "reply", "reward", "advantage", "tokens", "finish_reason")
Row = tuple[int, str, str, str, float | None, float | None, int, str]


def rows(step: int, groups: Sequence[grpo.Group], number: int) -> list[Row]:
    """Return the first rollouts of a step, from as many different groups as possible.

    Args:
        step: number of the step.
        groups: groups of the step.
        number: largest number of rows.
    """
    return [row for _, row in zip(range(number), _in_turn(step, groups), strict=False)]


def _in_turn(step: int, groups: Sequence[grpo.Group]) -> Iterator[Row]:
    """Yield the first rollout of each group, then the second of each, and so on."""
    for index in range(max((len(group.rollouts) for group in groups), default=0)):
        for group in groups:
            if index < len(group.rollouts):
                yield _row(step, group, group.rollouts[index])


def _row(step: int, group: grpo.Group, rollout: grpo.Rollout) -> Row:
    begin = len(group.prompt.messages)
    return (
        step,
        group.prompt.environment,
        _text(rollout.messages[:begin]),
        _text(rollout.messages[begin:]),
        rollout.reward,
        rollout.advantage if isinstance(rollout.advantage, float) else None,
        rollout.n_sampled,
        rollout.finish_reason,
    )


def _text(messages: Sequence[grpo.Message]) -> str:
    """Format messages as valid Unicode."""
    said = [str(message.get("content") or message.get("tool_calls") or "") for message in messages]
    return "\n".join(said).encode("utf-8", "replace").decode("utf-8")
