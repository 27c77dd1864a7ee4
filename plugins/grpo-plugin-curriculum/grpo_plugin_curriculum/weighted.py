"""A base of samplers whose tasks have weights in the configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import grpo_core as grpo

Shares = Literal["random", "drawn", "trained"]


class Weighted(grpo.WeightedTaskSampler):
    """Base class of the samplers of this plugin.

    Args:
        weights: weight of each task.  A task without one has weight 1.
        seed: seed of the draws.
        shares: exact shares of each request: ``"drawn"``, or ``"trained"``, as in the sampler ``mix``.

    Raises:
        ConfigError: a weight is not a finite number of at least 0.
    """

    def __init__(self, weights: Mapping[str, float] | None, seed: int, shares: Shares) -> None:
        super().__init__(seed, shares)
        self._weights = {task: self.checked(task, weight) for task, weight in (weights or {}).items()}

    def weights(self, tasks: Sequence[str], request: grpo.SampleRequest) -> list[float]:
        self.known(self._weights, tasks, "weigh")
        return [self._weights.get(task, 1.0) for task in tasks]
