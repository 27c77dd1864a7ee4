"""The learning rate over the updates of a run."""

from __future__ import annotations

import math

from grpo_core.config import TrainerConfig

KEYS = ("steps", "epochs", "updates_per_step", "lr", "lr_schedule", "lr_end", "warmup_updates")
"""Keys of ``[trainer]`` on which the learning rate of a step depends."""


def schedule(config: TrainerConfig, update: int) -> float:
    """Return the factor of an update's learning rates, counted from 0 over all steps: warm-up, then shape."""
    total = config.steps * config.updates_per_step
    done = min(1.0, max(0, update - config.warmup_updates) / max(1, total - config.warmup_updates))
    shape = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": (1 + math.cos(math.pi * done)) / 2,
    }[config.lr_schedule]
    scheduled = shape if config.lr_schedule == "constant" else config.lr_end + (1 - config.lr_end) * shape
    warm = min(1.0, (update + 1) / (config.warmup_updates + 1))
    return scheduled * warm


def rate(config: TrainerConfig, step: int) -> float:
    """Return the learning rate of a step's first update; the first step is 0."""
    return config.lr * schedule(config, step * config.updates_per_step)
