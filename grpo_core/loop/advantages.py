"""The default advantage function, and clipping for any.  Pure.

An advantage function takes the groups of a step and returns, for each group, one float or None for each
rollout.  None masks the rollout: it is not trained and does not count.  Plugins add more with
``grpo_advantages``.  The formula is in ``grpo_core.advantages``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from attrs import frozen

from grpo_core.contracts import advantages as formulas
from grpo_core.contracts.protocols import AdvantageFunction
from grpo_core.contracts.records import Group
from grpo_core.loop.rows import Advantages, Scores, checked_scores


@frozen
class Clipped:
    """An advantage function clipped to [``low``, ``high``]; None means no limit."""

    function: AdvantageFunction
    low: float | None = None
    high: float | None = None

    def __call__(self, groups: Sequence[Group], /) -> Scores:
        scores = checked_scores(self.function(groups), groups, str(self))
        return [[self._limited(value) for value in row] for row in scores]

    def _limited(self, value: float | Advantages | None) -> float | Advantages | None:
        if value is None or isinstance(value, float):
            return None if value is None else formulas.clipped(value, self.low, self.high)
        return np.clip(value, self.low, self.high)

    def __str__(self) -> str:
        return str(self.function)


def check_group(*, scale: str = "group", **options: Any) -> None:
    numbers = {name: options[name] for name in ("ddof", "epsilon") if name in options}
    formulas.check_ranges(scale=scale, **numbers)
    if scale == "none" and numbers:
        raise ValueError(
            f"{min(numbers)} does nothing with scale = 'none', which does not divide: leave one of them out"
        )


def group(
    groups: Sequence[Group],
    *,
    scale: Literal["group", "batch", "others", "none"] = "group",
    leave_one_out: bool = False,
    ddof: int = 1,
    epsilon: float = 0.0,
) -> list[list[float | None]]:
    """Compute advantages relative to the group's mean reward (GRPO); see ``grpo_core.advantages.normalize``.

    A rollout without a reward is masked.

    Args:
        groups: the groups of a step.
        scale: ``"group"`` divides by the standard deviation of the group's rewards, ``"batch"`` by that of
            all rewards of the step, ``"others"`` by that of the other rewards of the group (unless they are
            equal), ``"none"`` does not divide.
        leave_one_out: compare each reward with the mean of the other rewards of its group.
        ddof: the variance is the sum of squares over n - ``ddof``.
        epsilon: is added to the standard deviation.

    Raises ValueError for a reward that is not finite, or an unknown ``scale``.
    """
    rewards = [each.rewards for each in groups]
    return formulas.group(rewards, scale=scale, leave_one_out=leave_one_out, ddof=ddof, epsilon=epsilon)
