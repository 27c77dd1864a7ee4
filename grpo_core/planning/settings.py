"""Which configuration keys a forecast can change."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from grpo_core.errors import ConfigError

SIMULATED = (
    "checkpoint.every",
    "checkpoint.every_minutes",
    "dynamic_sampling.*",
    "engine.max_requests",
    "engine.workers",
    "loss.all_rows",
    "pipeline.*",
    "rollout.deadline",
    "rollout.group_size",
    "rollout.max_in_flight",
    "rollout.max_retries",
    "rollout.max_tokens",
    "trainer.prompts_per_step",
    "trainer.steps",
    "validation.at_start",
    "validation.every",
    "validation.pause",
)
"""Patterns of keys that the simulated pipeline obeys."""
WITHOUT_EFFECT = (
    "checkpoint.best",
    "checkpoint.keep",
    "health.*",
    "seed",
    "tracking.*",
    "trainer.betas",
    "trainer.lr",
    "trainer.lr_*",
    "trainer.max_grad_norm",
    "trainer.stop_when",
    "trainer.warmup_updates",
    "trainer.weight_decay",
)
"""Patterns of keys that may change what a run learns, and hardly what a step takes."""


DRAWN = (
    "advantage.*",
    "sampler.*",
    "shaping.*",
    "tasks.*",
    "validation.deadline",
    "validation.prompts",
)
"""Patterns of keys that the simulated pipeline obeys because rollouts are drawn."""


def unknown(changes: Iterable[str], *patterns: str) -> list[str]:
    """Return the keys whose effect on the times no simulated part knows; ``patterns`` are known, too."""
    known = (*SIMULATED, *WITHOUT_EFFECT, *patterns)
    return [key for key in changes if not _fits(key, known)]


def idle(changes: Iterable[str]) -> list[str]:
    """Return the keys among these that no time depends on."""
    return [key for key in changes if _fits(key, WITHOUT_EFFECT)]


def check_comparable(keys: Iterable[str]) -> None:
    """Raise ConfigError for keys whose values a simulation with given service times cannot compare."""
    if found := unknown(keys, *DRAWN):
        raise ConfigError(
            f"{', '.join(found)}: the simulation does not know what this changes, because the service times "
            "are the same for all of its values; give those of each value with --time, one command for "
            f"each. A sweep can change {', '.join(sorted((*SIMULATED, *DRAWN)))}"
        )


def _fits(key: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(key, pattern) for pattern in patterns)
