"""The memory of the trainer by part.  Pure."""

from __future__ import annotations

from typing import Any

from attrs import evolve

from grpo_core import MemoryPart
from grpo_core.kit import Config
from grpo_core.training import memory as of_torch
from grpo_plugin_scale.config import ScaledConfig

MOVED = ("weights", "adapters", "optimizer", "kept weights")
"""Parts that ``trainer.offload`` moves to the host between two steps."""


def memory(*, config: Config, **known: Any) -> list[MemoryPart]:
    """Return the parts, summed over all ranks; takes the arguments of ``trainer_parts``."""
    section, parts = config.section(ScaledConfig), of_torch.trainer_parts(config=config, **known)
    if section.weights == "bfloat16" and not any(each.weights == "ema" for each in config.scores.values()):
        parts = [evolve(one, nbytes=one.nbytes // 2) if one.name == "kept weights" else one for one in parts]
    moved = sum(part.nbytes for part in parts if part.device != "host" and part.name in MOVED)
    if section.offload and moved:
        change = "trainer.offload = false"
        parts.append(MemoryPart(name="weights between steps", nbytes=moved, change=change))
    return parts
