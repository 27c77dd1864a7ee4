"""The size of a micro-batch, and its fixed cost."""

from __future__ import annotations

import torch

from grpo_core.config import TrainerConfig
from grpo_core.training.logprobs import KEEP_BYTES


def token_budget(config: TrainerConfig, vocabulary: int, device: torch.device) -> int:
    """Return the largest number of tokens of a micro-batch, padding included.

    On a CPU it is small enough that the head keeps its probabilities for the backward pass, up to a
    vocabulary of 65,536 (a fifth of the work), in half of ``KEEP_BYTES`` if it can, so that activations stay
    small; products of fewer than 1024 tokens would be inefficient.
    """
    if device.type != "cpu":
        return config.tokens_per_microbatch
    kept = KEEP_BYTES // 2 // (torch.float32.itemsize * vocabulary)
    return min(config.tokens_per_microbatch, max(1024, kept))


def overhead(parameters: int, device: torch.device) -> int:
    """Return the fixed cost of a micro-batch (some milliseconds of dispatch) in tokens.

    In that time a CPU core does about 4e8 floating point operations and an accelerator 1e12; a token takes
    6 for each parameter (arXiv 2001.08361).  Small models are bound by dispatch themselves, hence the bound.
    """
    operations = 4e8 if device.type == "cpu" else 1e12
    return max(4, min(256, round(operations / (6 * parameters))))
