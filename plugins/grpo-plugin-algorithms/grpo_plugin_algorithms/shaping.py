"""The section ``[shaping]``: transforms rewards before advantages are computed.

Metrics, filters, samplers and the recorded rollouts keep the original rewards.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import isfinite
from typing import Any

import attrs
from attrs import evolve, field, frozen
from attrs.validators import ge, le

from grpo_core import ConfigError, Group, PluginError, Rollout, advantages, rewards
from grpo_core.kit import only_with


def _range(instance: object, attribute: attrs.Attribute[Any], value: tuple[float, float]) -> None:
    low, high = value
    if not low < high and value != (0.0, 0.0):
        raise ValueError(f"'{attribute.name}' must be [low, high] with low < high: {list(value)}")


def _finite(instance: object, attribute: attrs.Attribute[Any], value: dict[str, float]) -> None:
    if not all(map(isfinite, value.values())):
        raise ValueError(f"'{attribute.name}' must be finite numbers: {value}")


@frozen(kw_only=True)
class ShapingConfig:
    """Shaping changes the rewards that advantages compare; metrics and records keep the original ones.

    It is applied in the order of the keys.
    """

    weights: dict[str, float] = field(factory=dict, validator=_finite)
    """The reward is the sum of these parts (`Feedback.metrics`, added over the turns), each times its weight;
    without parts, the environment's reward."""
    source: tuple[float, float] = field(default=(0.0, 0.0), validator=_range)
    """Rewards are clipped to this range, [lowest, highest], and mapped to `target`; [0, 0] is off."""
    target: tuple[float, float] = field(default=(0.0, 0.0), validator=_range)
    """The range `source` becomes this range; [0, 0] only clips."""
    truncated_factor: float = field(default=1.0, validator=[ge(0), le(1)])
    """The reward of a rollout that a token limit cut off is multiplied by this."""
    token_price: float = field(default=0.0, validator=ge(0))
    """Each sampled token costs this much reward."""
    overlong_buffer: int = field(default=0, validator=ge(0))
    """DAPO's soft overlong punishment rises over this many tokens below `overlong_limit`; 0 is off."""
    overlong_limit: int = field(default=0, validator=ge(0), metadata=only_with("overlong_buffer"))
    """Rollouts with this many sampled tokens or more have the whole penalty; 0 takes `rollout.max_tokens` for
    each of their turns."""
    overlong_penalty: float = field(default=1.0, validator=ge(0), metadata=only_with("overlong_buffer"))
    """The whole penalty of an overlong rollout."""

    def reward_shaping(self, max_tokens: int) -> Shaping | None:
        """Return the shaping of rewards, or None if all keys are off.

        Raises ConfigError for keys that do not fit.
        """
        if self == ShapingConfig():
            return None
        limit = self.overlong_limit or max_tokens
        if 0 < limit < self.overlong_buffer:  # 0: the model is not there yet
            raise ConfigError(
                f"shaping.overlong_buffer is {self.overlong_buffer}; expected at most "
                f"shaping.overlong_limit, which is {limit}"
            )
        if any(self.target) and not any(self.source):
            raise ConfigError("shaping.target needs shaping.source, the range that it maps")
        return Shaping(self, max_tokens)


@frozen
class Shaping:
    """Shapes the rewards of groups; an unscored rollout stays unscored."""

    keys: ShapingConfig
    max_tokens: int = 0
    """Limit of sampled tokens of a turn, from which the overlong limit follows if it is not set."""

    @property
    def parts(self) -> Collection[str]:
        """The metrics of which the reward is made."""
        return self.keys.weights.keys()

    def __call__(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups with shaped rewards.  Raises PluginError if a rollout lacks a part."""
        return [
            evolve(group, rollouts=tuple(self._rollout(rollout, group) for rollout in group.rollouts))
            for group in groups
        ]

    def checked(self, rollout: Rollout) -> Rollout:
        """Return the rollout, or an unscored copy if a part with a weight is not finite."""
        bad = sorted(self.keys.weights.keys() & rollout.left_out.keys())
        if rollout.reward is None or not bad:
            return rollout
        error = (
            f"shaping.weights uses {bad[0]!r}, which is {rollout.left_out[bad[0]]}, expected a finite number"
        )
        return evolve(rollout, reward=None, success=None, error=error)

    def _rollout(self, rollout: Rollout, its: Group) -> Rollout:
        if rollout.reward is None:
            return rollout
        keys, shaped, length = self.keys, rollout.reward, rollout.n_sampled
        if keys.weights:
            if missing := sorted(set(keys.weights) - set(rollout.metrics)):
                raise PluginError(
                    f"shaping.weights: prompt {its.prompt.id!r} of task {its.prompt.environment!r} has no "
                    f"metric {', '.join(missing)}; its environment gives Feedback.metrics "
                    f"{sorted(rollout.metrics)}"
                )
            shaped = advantages.combine(rollout.metrics, keys.weights) or 0.0
        if any(keys.source):
            shaped = rewards.scaled(shaped, keys.source, keys.target if any(keys.target) else keys.source)
        if rollout.truncated:
            shaped *= keys.truncated_factor
        shaped -= keys.token_price * length
        if keys.overlong_buffer:
            limit = keys.overlong_limit or self.max_tokens * max(1, rollout.turns)
            shaped += rewards.overlong(
                length, limit=limit, buffer=keys.overlong_buffer, penalty=keys.overlong_penalty
            )
        turns = rollout.turn_rewards
        if turns:  # the penalties of the whole rollout belong to its last turn
            turns = (*turns[:-1], turns[-1] + shaped - rollout.reward)
        return evolve(rollout, reward=shaped, turn_rewards=turns)
