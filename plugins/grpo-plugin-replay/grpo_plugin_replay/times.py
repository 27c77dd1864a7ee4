"""The service times of a run's parts, and the distribution of rollouts."""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, field, frozen
from attrs.validators import ge, gt, le

from grpo_core import ConfigError
from grpo_core.config import merge, parse_settings, read_toml, structured


@frozen
class Outcome:
    """Lengths and reward of a rollout."""

    turn_tokens: tuple[int, ...]
    """Number of tokens of each completion."""
    reward: float


@frozen(kw_only=True)
class EngineTimes:
    """An engine that decodes one token of all its rows at a time."""

    token: float = field(default=0.02, validator=gt(0))
    """Seconds for a token of a single row."""
    row: float = field(default=0.0, validator=ge(0))
    """Seconds that each further row adds to `token`."""
    rows: int = field(default=0, validator=ge(0))
    """Largest number of rows that an engine decodes together; the others wait, the oldest first. 0 means no
    limit."""
    prompt_token: float = field(default=0.0, validator=ge(0))
    """Seconds for a token of a prompt; all rows wait meanwhile."""
    sync: float = field(default=0.0, validator=ge(0))
    """Seconds of a weight sync; decoding pauses meanwhile."""
    canary: float = field(default=0.0, validator=ge(0))
    """Seconds after a weight sync until the canary is answered; decoding continues meanwhile."""


@frozen(kw_only=True)
class RolloutTimes:
    """The lengths and rewards of rollouts, which are independent of each other."""

    tokens: float = field(default=256.0, validator=ge(1))
    """Mean number of tokens of a completion, before `rollout.max_tokens` cuts it off."""
    spread: float = field(default=0.5, validator=ge(0))
    """Standard deviation of the number of tokens, as a share of the mean; the distribution is log-normal."""
    turns: int = field(default=1, validator=ge(1))
    """Number of completions of a rollout."""
    prompt_tokens: int = field(default=128, validator=ge(1))
    """Number of tokens of a prompt."""
    pass_rate: float = field(default=0.5, validator=[ge(0), le(1)])
    """Share of rollouts with reward 1; the others have reward 0."""

    def drawn(self, rng: random.Random) -> Outcome:
        """Draw a rollout."""
        lengths = (max(1, round(log_normal(rng, self.tokens, self.spread))) for _ in range(self.turns))
        return Outcome(tuple(lengths), float(rng.random() < self.pass_rate))


@frozen(kw_only=True)
class EnvironmentTimes:
    """An environment without a limit of concurrent calls."""

    turn: float = field(default=0.0, validator=ge(0))
    """Seconds of a completion that do not depend on its tokens: its session, its prompt, its judgement."""
    spread: float = field(default=0.0, validator=ge(0))
    """Standard deviation of these seconds, as a share of the mean; the distribution is log-normal."""


@frozen(kw_only=True)
class TrainerTimes:
    """A trainer."""

    step: float = field(default=0.0, validator=ge(0))
    """Seconds of a step that do not depend on its rows."""
    token: float = field(default=0.0, validator=ge(0))
    """Seconds that each token of the trained rows adds, prompts included."""
    spread: float = field(default=0.0, validator=ge(0))
    """Standard deviation of a step's seconds, as a share of the mean; the distribution is log-normal."""
    publish: float = field(default=0.0, validator=ge(0))
    """Seconds from the end of a step until the new weights can be sent."""


@frozen(kw_only=True)
class CheckpointTimes:
    """Checkpoints."""

    cut: float = field(default=0.0, validator=ge(0))
    """Seconds for which training waits at the start of a checkpoint."""
    write: float = field(default=0.0, validator=ge(0))
    """Seconds for writing it while training continues."""


@frozen(kw_only=True)
class Times:
    """The service times of a run, by part."""

    engine: EngineTimes = field(factory=EngineTimes)
    rollout: RolloutTimes = field(factory=RolloutTimes)
    environment: EnvironmentTimes = field(factory=EnvironmentTimes)
    trainer: TrainerTimes = field(factory=TrainerTimes)
    checkpoint: CheckpointTimes = field(factory=CheckpointTimes)


def fitting(max_tokens: int) -> Times:
    """Return the default times, with a mean length well below the limit of tokens."""
    default = RolloutTimes()
    return Times(rollout=evolve(default, tokens=min(default.tokens, max(1.0, max_tokens / 2))))


def read_times(file: Path | None, settings: Iterable[str], fitted: Times | None = None) -> Times:
    """Return the times from a TOML file and settings such as "engine.token=0.02".

    Args:
        fitted: times of all other keys; None takes the defaults.

    Raises ConfigError for unknown keys and impossible values.
    """
    table: Mapping[str, Any] = {} if fitted is None else asdict(fitted)
    table = table if file is None else merge(table, read_toml(file))
    try:
        given = [*settings]
        for setting in given:
            if "=" not in setting:
                raise ConfigError(
                    f"--time {setting}: expected part.key=seconds, as in --time engine.token=0.02"
                )
        return structured(Times, parse_settings(given, onto=table))
    except ConfigError as error:
        raise ConfigError(f"service times: {error}") from None


def log_normal(rng: random.Random, mean: float, spread: float) -> float:
    """Draw a number with this mean, and a standard deviation of ``spread`` times the mean."""
    if not spread or not mean:
        return mean
    variance = math.log1p(spread * spread)
    return mean * math.exp(rng.gauss(0.0, math.sqrt(variance)) - variance / 2)
