"""A sampler that draws tasks in proportion to the variance of their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import grpo_core as grpo
from grpo_plugin_curriculum.weighted import Shares, Weighted

LARGEST = 0.25
"""Largest variance of a reward that is 0 or 1."""


class Learnable(Weighted):
    """Draws a task in proportion to ``p * (1 - p)``, with ``p`` the share of its rollouts that succeed.

    ``p`` is an exponential mean over the groups in the order of observation, and starts at 0.5.

    Args:
        floor: share of the largest weight that each task keeps.
        memory: share of ``p`` that remains when a group is observed.
        success: a rollout with this reward or more has succeeded.  None: what the task declares as a success,
            or a reward of 1 if it declares none.
        weights: factor of each task's weight.  Default: the tasks' weights in the configuration, or 1.
        seed: seed of the draws.  Default: the run's seed.
        shares: exact shares of each request: ``"drawn"``, or ``"trained"``, as in the sampler ``mix``.

    Raises:
        ConfigError: a number is out of range, or a weight names an unknown task.
    """

    name = "learnable"

    def __init__(
        self,
        floor: float = 0.1,
        memory: float = 0.95,
        success: float | None = None,
        weights: Mapping[str, float] | None = None,
        seed: int = 0,
        shares: Shares = "random",
    ) -> None:
        super().__init__(weights, seed, shares)
        if not (0 < floor <= 1 and 0 <= memory < 1):
            raise grpo.ConfigError(
                f"sampler learnable: expected 0 < floor <= 1 and 0 <= memory < 1, got {floor} and {memory}"
            )
        self._floor, self._memory, self._success = floor, memory, success
        self._rates: dict[str, float] = {}

    def observe(self, groups: Sequence[grpo.Group]) -> None:
        """Record the groups' rewards."""
        for group in groups:
            if not (succeeded := group.successes(self._success)):
                continue
            task, now = group.prompt.environment, fmean(succeeded)
            before = self._rates.get(task, 0.5)
            self._rates[task] = self._memory * before + (1 - self._memory) * now

    def weights(self, tasks: Sequence[str], request: grpo.SampleRequest) -> list[float]:
        weights = super().weights(tasks, request)
        return [weight * self._learnable(task) for task, weight in zip(tasks, weights, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rates": self._rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._rates = dict(state["rates"])

    def _learnable(self, task: str) -> float:
        rate = self._rates.get(task, 0.5)
        return self._floor + (1 - self._floor) * rate * (1 - rate) / LARGEST
