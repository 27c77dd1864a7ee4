"""Preflight checks for settings that a service with Tinker's protocol does not support."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from grpo_core import ConfigError
from grpo_core.kit import Config, as_table
from grpo_plugin_tinker.section import TinkerConfig

KEY = "TINKER_API_KEY"
KNOWN = ("clip_low", "clip_high", "correction")
"""Supported options of the loss ``grpo``."""
UNKNOWN = (
    "updates_per_step", "activations", "compile", "profile", "gpus", "threads", "device",
    "packing", "tokens_per_microbatch",
)  # fmt: skip
"""Unsupported keys of [trainer], which concern local computation."""
OF_SCALE = {"offload": False, "ranks": 1, "weights": "float32"}
"""Unsupported keys of grpo-plugin-scale, with their defaults."""


def of_engine(*, config: Config) -> None:
    """Raise ConfigError for unsupported settings of sampling."""
    section = config.section(TinkerConfig)
    _check_key(section)
    if config.trainer.name != "tinker":
        raise ConfigError(
            f'engine.name = "tinker" samples snapshots that the service has trained, and trainer.name is '
            f'"{config.trainer.name}"; set it to "tinker"'
        )
    if config.rollout.stop:
        raise ConfigError(
            f"rollout.stop = {config.rollout.stop!r}: in Tinker's protocol a completion ends at tokens or at "
            "strings, and the model's own ends are tokens; leave it out"
        )
    sets = [config.validation, *map(config.validation.of_set, config.validation.sets)]
    if any(each.min_p for each in sets):
        raise ConfigError("validation.min_p: Tinker's protocol does not have it; leave it out")
    if config.pipeline.max_staleness + 2 > section.snapshots:
        raise ConfigError(
            f"tinker.snapshots = {section.snapshots}: with pipeline.max_staleness = "
            f"{config.pipeline.max_staleness} at least {config.pipeline.max_staleness + 2} are sampled from"
        )


def of_trainer(*, config: Config, base_model: str = "", **_: Any) -> None:
    """Raise ConfigError for unsupported settings of training."""
    _check_key(config.section(TinkerConfig))
    if not base_model:
        raise ConfigError(
            'trainer.options.base_model is missing: name a model of the service, or set model.path = "tinker:'
            'NAME", which does it'
        )
    if problem := next(_problems(config), ""):
        raise ConfigError(f'trainer.name = "tinker": {problem}')


def _problems(config: Config) -> Iterator[str]:
    for key, engine in (("engine", config.engine), ("validation.engine", config.validation.engine)):
        if engine is not None and engine.name != "tinker":
            yield f'its weights stay at the service, so {key}.name has to be "tinker", and is "{engine.name}"'
    trainer, core = as_table(config)["trainer"], as_table(Config())["trainer"]
    for key, usual in ({key: core[key] for key in UNKNOWN} | OF_SCALE).items():
        if (given := trainer.get(key, usual)) != usual:
            yield f"trainer.{key} = {given!r} has no meaning for the service; leave it out"
    if config.rollout.temperature != 1.0:
        yield (
            f"rollout.temperature = {config.rollout.temperature:g}, and the service computes logprobs at 1; "
            "leave it at 1"
        )
    loss, optimizer = config.loss, config.optimizer
    if loss.name != "grpo":
        yield (
            f'loss.name = "{loss.name}" is not a loss of the service: it computes "grpo" by its cispo or ppo'
        )
    for name, value in loss.options.items():
        if name not in KNOWN and value:
            yield f"loss.options.{name} = {value!r} is not an option that the service computes; leave it out"
    if not _correction(loss.options).keys() <= {"cap"}:
        yield f'loss.options.correction = {loss.options["correction"]!r}: the service has "token_truncate"'
    if loss.max_sequence_error:
        yield "loss.max_sequence_error needs logprobs before the step; leave it out"
    if optimizer.name != "adamw" or optimizer.options or optimizer.groups:
        yield "the service's optimizer is AdamW with one learning rate; leave out [optimizer]"


def service_loss(
    options: Mapping[str, Any], proximal: str
) -> tuple[Literal["cispo", "ppo"], dict[str, float]]:
    """Return name and options of the service's loss that equals ``grpo`` with these options.

    With one update for each step and recomputed proximal logprobs, the gradient of ``grpo`` equals CISPO's
    with the ratio policy / generation clipped to [0, ``correction.cap``].  If proximal is generation, it is
    PPO's.
    """
    if proximal == "recompute":
        cap = float(_correction(options).get("cap", 2.0))
        return "cispo", {"clip_low_threshold": 0.0, "clip_high_threshold": cap}
    low, high = float(options.get("clip_low", 0.2)), float(options.get("clip_high", 0.28))
    return "ppo", {"clip_low_threshold": 1 - low, "clip_high_threshold": 1 + high}


def _correction(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table of the loss's correction, without its name if that is the usual one."""
    given = options.get("correction", {})
    table = given if isinstance(given, Mapping) else {"name": given}
    return {key: value for key, value in table.items() if (key, value) != ("name", "token_truncate")}


def _check_key(section: TinkerConfig) -> None:
    """Raise ConfigError for a missing or malformed key."""
    key = os.environ.get(KEY, "")
    elsewhere = section.base_url or os.environ.get("TINKER_BASE_URL")
    if not key and not elsewhere:
        raise ConfigError(
            f"the environment variable {KEY} is not set; it holds the key of Tinker's service "
            "(tinker.base_url names another service)"
        )
    if key and not key.startswith("tml-"):
        raise ConfigError(f'the environment variable {KEY} holds no key of Tinker, which begins with "tml-"')
