"""The keys that this plugin adds to ``[trainer]``, and checks of their combinations."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod
from typing import Literal

from attrs import field, frozen
from attrs.validators import ge

from grpo_core import ConfigError, Transport
from grpo_core.kit import Config, PluginHost, files


@frozen(kw_only=True)
class ScaledConfig:
    """Keys of ``[trainer]``: several processes, and weights in bfloat16 or away from the GPU."""

    ranks: int = field(default=1, validator=ge(1))
    """Number of processes that train together: each holds a part of the weights, gradients and optimizer, and
    computes a part of the rows. Each uses one GPU, if there are GPUs."""
    weights: Literal["float32", "bfloat16"] = "float32"
    """Weights of the forward and backward passes: "float32", which matrix products round, or "bfloat16",
    copies of one layer at a time (FSDP2's mixed precision). With "bfloat16" activations are bfloat16, and the
    trainer scores with exactly the weights that engines receive. The optimizer updates float32 weights. For
    `model.dtype = "bfloat16"`."""
    offload: bool = False
    """Keep the weights and the optimizer's state in the machine's memory between two steps, which leaves the
    GPU to an engine. For `pipeline.max_staleness = 0`, where engine and trainer take turns."""

    @property
    def divides(self) -> bool:
        """Whether FSDP2 manages the weights: for several ranks, or for bfloat16 copies."""
        return self.ranks > 1 or self.weights != "float32"

    @property
    def held(self) -> str:
        """The key that makes FSDP2 manage the weights, with its value."""
        return f"trainer.ranks = {self.ranks}" if self.ranks > 1 else 'trainer.weights = "bfloat16"'


def ranks(config: Config, host: PluginHost) -> int:
    """Return the number of processes of the trainer ``torch``."""
    return config.section(ScaledConfig).ranks


def check(*, config: Config, host: PluginHost, **options: object) -> None:
    """Raise ConfigError for unsupported combinations of keys."""
    section = config.section(ScaledConfig)
    if section.weights == "bfloat16" and config.model.dtype != "bfloat16":
        raise ConfigError(
            'trainer.weights = "bfloat16": engines have to get the weights that the trainer scores with, and '
            f'model.dtype = "{config.model.dtype}" may give them others; set model.dtype = "bfloat16"'
        )
    if section.divides:
        if config.trainer.compile:
            raise ConfigError(
                f"{section.held}: trainer.compile = true is for one process with float32 weights; leave one "
                "of them out"
            )
        name = config.optimizer.name
        if not host.find("optimizer", name).offer.elementwise:
            raise ConfigError(
                f"{section.held}: the optimizer {name!r} computes with whole parameters, of which each rank "
                'holds a part; use optimizer.name = "adamw"'
            )
        refuse_experts(section, config.model.path)
    if section.offload:
        if config.pipeline.max_staleness:
            raise ConfigError(
                "trainer.offload = true is for a trainer and an engine that take turns on a GPU; with "
                f"pipeline.max_staleness = {config.pipeline.max_staleness} both work at once: set it to 0"
            )
        if config.trainer.device == "cpu":
            raise ConfigError(
                "trainer.offload = true moves weights from a GPU to the machine's memory, where "
                'trainer.device = "cpu" has them already; leave one of them out'
            )
        if section.divides:
            raise ConfigError(
                f"trainer.offload = true: the weights of {section.held} stay on their GPUs; leave one of "
                "them out"
            )


def refuse_experts(section: ScaledConfig, path: str) -> None:
    """Raise ConfigError if a model's files have separate tensors for experts; reads headers only.

    transformers stacks these tensors while loading, and FSDP2 cannot shard them.
    """
    if not section.divides or (directory := files.directory_here(path)) is None:
        return
    tensors = files.ModelFiles(directory).tensors
    if name := next((name for name in tensors if re.search(r"\.experts\.\d+\.", name)), ""):
        raise ConfigError(
            f"{section.held}: model {path!r} is a mixture of experts, and transformers stacks the tensors of "
            f"its experts ({name} for one), which cannot be divided; train this model with trainer.ranks = 1 "
            'and trainer.weights = "float32", where the weights alone take '
            f"{4 * sum(prod(each.shape) for each in tensors.values()) / 2**30:.1f} GiB"
        )


def collective(*, host: str = "127.0.0.1", ports: Sequence[int] = (0, 0)) -> Transport:
    """Return the transport between machines.

    Args:
        host: address of the trainer's machine at which engines reach it; on a cluster, in its network.
        ports: range of ports, [first, last], in which each rank of the trainer listens for engines, at the
            first free one; [0, 0] is any free port.  A firewall has to allow the range.
    """
    if len(ports) != 2 or (tuple(ports) != (0, 0) and not 1 <= ports[0] <= ports[1] <= 65535):
        raise ValueError(
            f"engine.transport_options.ports = {list(ports)}: expected [first, last] with "
            "1 <= first <= last <= 65535, or [0, 0] for any free port"
        )
    return Transport(
        writer="grpo_plugin_scale.weights.collective:writer",
        reader="grpo_plugin_scale.weights.collective:pulled",
        stream="grpo_plugin_scale.weights.collective:streamed",
        remote=True,
        host=host,
        on_device=True,
    )
