"""Shaping: what advantages compare instead of the rewards that the environment gave.  Pure.

Metrics, filters, samplers and the recorded rollouts keep the original rewards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from attrs import evolve, field, frozen

from grpo_core.advantages import combine
from grpo_core.errors import PluginError
from grpo_core.records import Group, Rollout
from grpo_core.rewards import overlong, scaled


@frozen(kw_only=True)
class Shaping:
    """Shapes the rewards of groups, in the order of its fields; an unscored rollout stays unscored."""

    weights: Mapping[str, float] = field(factory=dict)
    """Weight of each part (``Rollout.metrics``) whose sum replaces the reward; none keeps the reward."""
    source: tuple[float, float] | None = None
    target: tuple[float, float] | None = None
    """Range to which the range ``source`` is mapped."""
    truncated_factor: float = 1.0
    """Factor of the reward of rollouts that a token limit cut off."""
    token_price: float = 0.0
    """Reward that each sampled token costs."""
    limit: int = 0
    """Sampled tokens of a rollout, or of each of its turns, from which the overlong penalty is whole."""
    limit_of_turns: bool = False
    """Whether ``limit`` is that of a turn: a rollout of several has as much room as they have together."""
    buffer: int = 0
    """Tokens below the limit over which it rises; 0 is no penalty."""
    penalty: float = 1.0

    def __call__(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with shaped rewards.  Raises PluginError if a rollout lacks a part."""
        return [
            evolve(group, rollouts=tuple(self._rollout(rollout, group) for rollout in group.rollouts))
            for group in groups
        ]

    def checked(self, rollout: Rollout) -> Rollout:
        """Return a rollout, unscored if a part that is paid is no number: it is as good as a reward."""
        bad = sorted(self.weights.keys() & rollout.left_out.keys())
        if rollout.reward is None or not bad:
            return rollout
        error = (
            f"shaping.weights pays {bad[0]!r}, which is {rollout.left_out[bad[0]]}, expected a finite number"
        )
        return evolve(rollout, reward=None, success=None, error=error)

    def _rollout(self, rollout: Rollout, its: Group) -> Rollout:
        if rollout.reward is None:
            return rollout
        shaped = self._reward(rollout, its)
        turns = rollout.turn_rewards
        if turns:  # what belongs to the whole rollout belongs to its end
            turns = (*turns[:-1], turns[-1] + shaped - rollout.reward)
        return evolve(rollout, reward=shaped, turn_rewards=turns)

    def _reward(self, rollout: Rollout, its: Group) -> float:
        reward, length = rollout.reward or 0.0, rollout.n_sampled
        if self.weights:
            reward = self._sum(rollout, its)
        if self.source is not None and self.target is not None:
            reward = scaled(reward, self.source, self.target)
        if rollout.truncated:
            reward *= self.truncated_factor
        reward -= self.token_price * length
        if self.buffer:
            limit = self.limit * (max(1, rollout.turns) if self.limit_of_turns else 1)
            reward += overlong(length, limit=limit, buffer=self.buffer, penalty=self.penalty)
        return reward

    def _sum(self, rollout: Rollout, its: Group) -> float:
        if missing := sorted(set(self.weights) - set(rollout.metrics)):
            raise PluginError(
                f"shaping.weights: prompt {its.prompt.id!r} of task {its.prompt.environment!r} has no metric "
                f"{', '.join(missing)}; its environment gives Feedback.metrics {sorted(rollout.metrics)}"
            )
        return combine(rollout.metrics, self.weights) or 0.0


def shaped_rewards(groups: Sequence[Group]) -> dict[str, float]:
    """Return the mean of the shaped rewards by task, as metrics."""
    rewards: dict[str, list[float]] = defaultdict(list)
    for group in groups:
        rewards[group.prompt.environment] += [reward for reward in group.rewards if reward is not None]
    return {f"shaped_reward/{task}": fmean(its) for task, its in sorted(rewards.items()) if its}
