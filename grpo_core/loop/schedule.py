"""The learning rate over the updates of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

from grpo_core.config import TrainerConfig
from grpo_core.contracts.errors import PluginError, describe
from grpo_core.plugins.files import load_object

KEYS = ("steps", "epochs", "updates_per_step", "lr", "lr_schedule", "lr_end", "warmup_updates")
"""Keys of ``[trainer]`` on which the learning rate of a step depends."""


def schedule(config: TrainerConfig, update: int, metrics: Callable[[], Any] = dict) -> float:
    """Return the factor of an update's learning rates, counted from 0 over all steps: warm-up, then shape.

    Args:
        config: the section of the trainer.
        update: number of the update.
        metrics: returns the metrics of the step so far, for a function that takes them.

    Raises PluginError if the function of a file fails, and ConfigError if there is no such function.
    """
    total = config.steps * config.updates_per_step
    done = min(1.0, max(0, update - config.warmup_updates) / max(1, total - config.warmup_updates))
    warm = min(1.0, (update + 1) / (config.warmup_updates + 1))
    return _shape(config, done, metrics) * warm


def _shape(config: TrainerConfig, done: float, metrics: Callable[[], Any]) -> float:
    if config.lr_schedule == "constant":
        return 1.0
    if config.lr_schedule == "linear":
        return config.lr_end + (1 - config.lr_end) * (1 - done)
    if config.lr_schedule == "cosine":
        return config.lr_end + (1 - config.lr_end) * (1 + math.cos(math.pi * done)) / 2
    key = f"trainer.lr_schedule = {config.lr_schedule!r}"
    function = load_object(config.lr_schedule, who="trainer.lr_schedule")
    try:
        factor = function(done, metrics()) if len(signature(function).parameters) > 1 else function(done)
    except Exception as error:
        raise PluginError(f"{key}: {describe(error)}") from error
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 <= factor < math.inf:
        raise PluginError(f"{key} returned {factor!r} for {done:g}; expected a finite number of at least 0")
    return float(factor)


def rate(config: TrainerConfig, step: int) -> float:
    """Return the learning rate of a step's first update; the first step is 0."""
    return config.lr * schedule(config, step * config.updates_per_step)
