"""The coefficient of an entropy bonus that follows a target."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from attrs import define


@define(kw_only=True)
class EntropyControl:
    """The coefficient of an entropy bonus, adapted after each update (Skywork-OR1, arXiv 2505.22312).

    It rises by ``delta`` after an update whose entropy is at or below ``target`` and falls by ``delta`` after
    any other.  It applies only while the last measured entropy is at or below the target, so not in the first
    update.
    """

    coefficient: float
    target: float
    delta: float
    low: float
    high: float
    entropy: float | None = None
    """Entropy of the last update, in nats; None before the first."""

    @classmethod
    def of(cls, loss: Callable[..., Any], options: Mapping[str, Any]) -> EntropyControl:
        """Make the control of a loss from the attributes of its option ``entropy``."""
        of = options.get("entropy", inspect.signature(loss).parameters["entropy"].default)
        return cls(coefficient=of.coefficient, target=of.target, delta=of.delta, low=of.min, high=of.max)

    @property
    def applied(self) -> float:
        """The coefficient of the next update's bonus."""
        return self.coefficient if self.entropy is not None and self.entropy <= self.target else 0.0

    def observe(self, entropy: float) -> None:
        """Adapt the coefficient to the entropy of an update."""
        self.entropy = entropy
        if entropy <= self.target:
            self.coefficient = min(self.coefficient + self.delta, self.high)
        else:
            self.coefficient = max(self.coefficient - self.delta, self.low)
