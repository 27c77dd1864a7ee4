"""Checks what an engine returns before any of it reaches the trainer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_core.contracts.errors import PluginError
from grpo_core.contracts.records import Completion, GenerationRequest

LOGPROB_SLACK = 1e-3
"""A logprob may exceed 0 by rounding."""


def check_completions(
    completions: Sequence[Completion], requests: Sequence[GenerationRequest], *, vocabulary: int = 2**31
) -> None:
    """Raises PluginError if an engine's answer breaks its contract: nothing of it may reach the trainer.

    Args:
        vocabulary: number of token ids that the model has.
    """
    if len(completions) != len(requests):
        raise PluginError(
            f"engine: generate() returned {len(completions)} completions for {len(requests)} requests"
        )
    for completion, request in zip(completions, requests, strict=True):
        if len(completion.tokens) > request.max_tokens:
            raise PluginError(
                f"engine: generate() returned {len(completion.tokens)} tokens; expected at most max_tokens = "
                f"{request.max_tokens}"
            )
    if not completions:
        return
    ids = np.concatenate([completion.tokens.ids for completion in completions])
    strange = ids[(ids < 0) | (ids >= vocabulary)]
    if strange.size:
        raise PluginError(
            f"engine: generate() returned the token id {strange[0]}; expected 0 or more, and less than the "
            f"{vocabulary} of the model's vocabulary"
        )
    logprobs = np.concatenate([completion.tokens.logprobs for completion in completions])
    valid = (-np.inf < logprobs) & (logprobs <= LOGPROB_SLACK)
    if not valid.all():
        raise PluginError(
            f"engine: generate() returned the logprob {logprobs[~valid][0]} for a sampled token; expected a "
            "finite number of at most 0"
        )
