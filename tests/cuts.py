"""States of a pipeline and of loaders as checkpoints hold them."""

from __future__ import annotations

from typing import Any

from grpo_core.data.samplers import PromptStream, RoundRobin
from grpo_core.loop import checkpoint
from grpo_core.loop.buffer import Buffer


def pipeline_at(step: int) -> dict[str, Any]:
    """Return the cut of a run that has made this many steps, and has nothing under way."""
    buffer: Buffer[Any, Any] = Buffer(prompts_per_step=2, max_staleness=1, num_steps=50)
    cut = checkpoint.snapshot(buffer, PromptStream(sampler=RoundRobin(), loaders={}, name="round_robin"))
    return {**cut, "buffer": {**cut["buffer"], "step": step}}


def loader_at(taken: int) -> dict[str, Any]:
    """Return the state of a task's loader that has given this many prompts."""
    position = {"prompts": 4, "fingerprint": "f", "seed": 0, "since": []}
    return {"dataloader": "", "rows": taken, "unfinished": {}, "position": position}
