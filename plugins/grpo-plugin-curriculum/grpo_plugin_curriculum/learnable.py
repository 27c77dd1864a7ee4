"""A sampler that draws tasks in proportion to the variance of their rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from attrs import define, field

import grpo_core as grpo
from grpo_plugin_curriculum.weighted import Observing

LARGEST = 0.25
"""Largest variance of a reward that is 0 or 1."""


@define(eq=False, slots=False)
class Learnable(Observing):
    """Draws a task in proportion to ``p * (1 - p)``, with ``p`` the share of its rollouts that succeed.

    ``p`` is an exponential moving average over groups in the order of observation, and starts at 0.5.

    Args:
        floor: share of the largest weight that each task keeps.
        memory: weight of the old ``p`` when a group is observed.

    Raises:
        ConfigError: a number is out of range, or a weight names an unknown task.
    """

    name = "learnable"

    floor: float = 0.1
    memory: float = 0.95
    _rates: dict[str, float] = field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        if not (0 < self.floor <= 1 and 0 <= self.memory < 1):
            raise grpo.ConfigError(
                f"sampler learnable: expected 0 < floor <= 1 and 0 <= memory < 1, got {self.floor} and "
                f"{self.memory}"
            )

    def observe(self, groups: Sequence[grpo.Group]) -> None:
        """Record the rewards of groups."""
        for group in groups:
            if not (succeeded := group.successes(self._success)):
                continue
            task, now = group.prompt.environment, fmean(succeeded)
            before = self._rates.get(task, 0.5)
            self._rates[task] = self.memory * before + (1 - self.memory) * now

    def weights(self, tasks: Sequence[str], request: grpo.SampleRequest) -> list[float]:
        rates = [self._rates.get(task, 0.5) for task in tasks]
        taught = [self.floor + (1 - self.floor) * rate * (1 - rate) / LARGEST for rate in rates]
        weights = super().weights(tasks, request)
        return [weight * share for weight, share in zip(weights, taught, strict=True)]

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rates": self._rates}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._rates = dict(state["rates"])
