"""The lengths and rewards of rollouts in a simulated run: drawn, or as they were recorded."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from typing import Protocol

from attrs import field, frozen

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

    def group(self, step: int, size: int, rng: random.Random) -> list[Outcome]:
        """Return the rollouts of a group that is drawn for this step."""
        ...

    def validation(self, size: int, rng: random.Random) -> list[Outcome]:
        """Return rollouts of a validation."""
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

    def group(self, step: int, size: int, rng: random.Random) -> list[Outcome]:
        return [self._one(rng) for _ in range(size)]

    def validation(self, size: int, rng: random.Random) -> list[Outcome]:
        return self.group(0, size, rng)

    def _one(self, rng: random.Random) -> Outcome:
        its = self.times
        lengths = tuple(max(1, round(log_normal(rng, its.tokens, its.spread))) for _ in range(its.turns))
        return Outcome(lengths, float(rng.random() < its.pass_rate))


@frozen
class RecordedOutcomes:
    """Rollouts of a run that was recorded.

    A group is one that was trained at about the same step; after the last recorded step, at about that one.
    """

    groups: Sequence[tuple[int, Sequence[Outcome]]]
    """The recorded groups with their steps, in the order of the steps."""
    prompt_tokens: int
    validated: Sequence[Outcome] = ()
    """Recorded rollouts of validations; if there are none, those of training stand for them."""
    max_turns: int = field(init=False)

    @max_turns.default
    def _most_turns(self) -> int:
        everything = [*(each for _, group in self.groups for each in group), *self.validated]
        return max(len(each.turn_tokens) for each in everything)

    def group(self, step: int, size: int, rng: random.Random) -> list[Outcome]:
        first, last = self.groups[0][0], self.groups[-1][0]
        window = max(2, (last - first + 1) // 10)
        at = min(max(step, first), last)
        near = [group for known, group in self.groups if abs(known - at) <= window]
        chosen = list(rng.choice(near or [group for _, group in self.groups]))
        rng.shuffle(chosen)
        return [*chosen[:size], *(rng.choice(chosen) for _ in range(size - len(chosen)))]

    def validation(self, size: int, rng: random.Random) -> list[Outcome]:
        known = self.validated or [each for _, group in self.groups for each in group]
        return [rng.choice(known) for _ in range(size)]


def log_normal(rng: random.Random, mean: float, spread: float) -> float:
    """Draw a number with this mean, and a standard deviation of ``spread`` times the mean."""
    if not spread or not mean:
        return mean
    variance = math.log1p(spread * spread)
    return mean * math.exp(rng.gauss(0.0, math.sqrt(variance)) - variance / 2)
