"""The hints from which ``self_distillation`` learns, and the rollouts that they teach."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from grpo_core import Group, Rollout

Teach = Literal["all", "wrong_only", "mix"]


@frozen(kw_only=True)
class Environment:
    """The hints of the environment: ``Prompt.hint`` and ``Feedback.hint``."""

    needs = ("hints",)

    def of(self, group: Group) -> list[str | None]:
        """Return the hint of each rollout of a group, or None."""
        return [rollout.hint for rollout in group.rollouts]


@frozen(kw_only=True)
class RightRollout:
    """The last reply of another rollout of the group that is right; None if there is none."""

    def of(self, group: Group) -> list[str | None]:
        """Return the hint of each rollout of a group, or None."""
        right = [i for i, rollout in enumerate(group.rollouts) if rollout.right and _reply(rollout)]
        hints: list[str | None] = []
        for i in range(len(group.rollouts)):
            others = [each for each in (*right, *right) if each != i]
            after = next((each for each in others if each > i), others[0] if others else None)
            hints.append(None if after is None else _reply(group.rollouts[after]))
        return hints


def chosen_hints(
    group: Group,
    *,
    hint: Environment | RightRollout = Environment(),
    teach: Teach = "wrong_only",
    **_: object,
) -> list[str | None]:
    """Return the hint of each rollout of a group that a hint teaches."""
    return [
        None if teach == "wrong_only" and rollout.right else its
        for rollout, its in zip(group.rollouts, hint.of(group), strict=True)
    ]


def _reply(rollout: Rollout) -> str:
    """Return the visible text of the last reply."""
    said = (message for message in reversed(rollout.messages) if message["role"] == "assistant")
    return str(next(said, {}).get("content") or "")
