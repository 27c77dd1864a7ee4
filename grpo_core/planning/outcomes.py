"""The lengths and rewards of rollouts in a simulated run."""

from __future__ import annotations

import math
import random
from typing import Protocol

from attrs import frozen

from grpo_core.planning.times import RolloutTimes


@frozen
class Outcome:
    """A rollout as it turns out."""

    turn_tokens: tuple[int, ...]
    """Number of tokens of each completion."""
    reward: float


class Outcomes(Protocol):
    """Says how the rollouts of a group turn out."""

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of a prompt."""
        ...

    @property
    def max_turns(self) -> int:
        """Largest number of completions of a rollout."""
        ...

    def group(self, progress: float, size: int, rng: random.Random) -> list[Outcome]:
        """Return the rollouts of a group that is drawn when this share of the run is over."""
        ...

    def validation(self, place: int, rng: random.Random) -> Outcome:
        """Return the rollout of a held-out prompt; a validation plays the same ones each time."""
        ...


@frozen
class DrawnOutcomes:
    """Rollouts with lengths and rewards from distributions, independent of each other."""

    times: RolloutTimes

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens of a prompt."""
        return self.times.prompt_tokens

    @property
    def max_turns(self) -> int:
        """Largest number of completions of a rollout."""
        return self.times.turns

    def group(self, progress: float, size: int, rng: random.Random) -> list[Outcome]:
        return [self._one(rng) for _ in range(size)]

    def validation(self, place: int, rng: random.Random) -> Outcome:
        return self._one(rng)

    def _one(self, rng: random.Random) -> Outcome:
        its = self.times
        lengths = tuple(max(1, round(log_normal(rng, its.tokens, its.spread))) for _ in range(its.turns))
        return Outcome(lengths, float(rng.random() < its.pass_rate))


def log_normal(rng: random.Random, mean: float, spread: float) -> float:
    """Draw a number with this mean, and a standard deviation of ``spread`` times the mean."""
    if not spread or not mean:
        return mean
    variance = math.log1p(spread * spread)
    return mean * math.exp(rng.gauss(0.0, math.sqrt(variance)) - variance / 2)
