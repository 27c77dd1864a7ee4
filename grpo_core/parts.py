"""Makes one part of a run from its section of the configuration."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from grpo_core.config import SamplerConfig
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import Sampler


def make_sampler(
    config: SamplerConfig, host: PluginHost, *, seed: int, weights: Mapping[str, float]
) -> Sampler:
    """The sampler; ``seed`` and the tasks' ``weights`` are given to factories that take them."""
    takes = inspect.signature(host.factory("sampler", config.name)).parameters
    known: dict[str, Any] = {"seed": seed, "weights": weights}
    options = {key: value for key, value in known.items() if key in takes} | config.options
    sampler: Sampler = host.make("sampler", config.name, **options)
    return sampler
