"""Checks requests for completions, and completions before any of them reaches the trainer."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from grpo_core.contracts.errors import EngineError, PluginError
from grpo_core.contracts.records import Completion, GenerationRequest

LOGPROB_SLACK = 1e-3
"""A logprob may exceed 0 by rounding."""


def check_completions(
    completions: Sequence[Completion], requests: Sequence[GenerationRequest], *, vocabulary: int = 2**31
) -> None:
    """Raise PluginError if completions break the engine's contract, so that none reaches the trainer.

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


def check_request(request: GenerationRequest, *, engine: str, vocabulary: int, positions: int) -> None:
    """Raise EngineError for a request that does not fit this vocabulary or number of positions."""
    n = len(request.prompt_ids)
    if not n:
        raise EngineError(f"engine {engine}: a request has no prompt tokens; a prompt needs at least one")
    lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
    if not 0 <= lowest <= highest < vocabulary:
        raise EngineError(
            f"engine {engine}: a prompt has tokens from {lowest} to {highest}; the model has {vocabulary} "
            "tokens"
        )
    if n + request.max_tokens > positions:
        raise EngineError(
            f"engine {engine}: a prompt of {n} tokens and max_tokens={request.max_tokens} exceed the "
            f"model's {positions} positions; shorten the prompts or lower rollout.max_tokens"
        )
    if request.max_tokens < 0 or request.temperature < 0:
        raise EngineError(
            f"engine {engine}: max_tokens={request.max_tokens}, temperature={request.temperature}: below 0"
        )
    if not (0 < request.top_p <= 1 and request.top_k >= 0 and 0 <= request.min_p <= 1):
        raise EngineError(
            f"engine {engine}: top_p={request.top_p}, top_k={request.top_k}, min_p={request.min_p}; expected "
            "0 < top_p <= 1, top_k >= 0 and 0 <= min_p <= 1"
        )
