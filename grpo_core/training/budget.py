"""The size of a micro-batch, and its fixed cost."""

from __future__ import annotations

import torch

from grpo_core.config import TrainerConfig
from grpo_core.training.logprobs import KEEP_BYTES

FIRST, MOST = 8192, 65_536
"""Tokens of a micro-batch that is chosen, before a GPU's memory has been measured and at most."""


def token_budget(config: TrainerConfig, vocabulary: int, device: torch.device) -> int:
    """Return the largest number of tokens of a micro-batch, padding included.

    On a CPU it is small enough that the head keeps its probabilities for the backward pass, up to a
    vocabulary of 131,072 (a fifth of the work), in a quarter of ``KEEP_BYTES`` if it can, so that activations
    stay small; products of fewer than 512 tokens would be inefficient.
    """
    chosen = config.tokens_per_microbatch or FIRST
    if device.type != "cpu":
        return chosen
    kept = KEEP_BYTES // 4 // (torch.float32.itemsize * vocabulary)
    return min(chosen, max(512, kept))


def fitting(*, tokens: int, nbytes: int, free: int) -> int:
    """Return the tokens of a micro-batch for which half of a GPU's free memory is enough.

    The other half is for rows of other lengths, and for an engine that grows on the same GPU.

    Args:
        tokens: of the largest micro-batch of a step.
        nbytes: that the step took at its peak, in addition to what it kept.
        free: bytes between steps.
    """
    fits = free * tokens // (2 * max(nbytes, 1))
    return max(FIRST, min(MOST, fits - fits % FIRST))


def overhead(parameters: int, device: torch.device) -> int:
    """Return the fixed cost of a micro-batch (some milliseconds of dispatch) in tokens.

    In that time a CPU core does about 4e8 floating point operations and an accelerator 1e12; a token takes
    6 for each parameter (arXiv 2001.08361).  Small models are bound by dispatch themselves, hence the bound.
    """
    operations = 4e8 if device.type == "cpu" else 1e12
    return max(4, min(256, round(operations / (6 * parameters))))
