"""Checks what an engine returns before any of it reaches the trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from grpo_core.errors import PluginError
from grpo_core.records import Completion, GenerationRequest

LOGPROB_SLACK = 1e-3
"""A logprob may exceed 0 by rounding."""


def check_completions(completions: Sequence[Completion], requests: Sequence[GenerationRequest]) -> None:
    """Raises PluginError if an engine's answer breaks its contract: nothing of it may reach the trainer."""
    if len(completions) != len(requests):
        raise PluginError(
            f"engine: generate() returned {len(completions)} completions for {len(requests)} requests"
        )
    for completion, request in zip(completions, requests, strict=True):
        lengths = len(completion.token_ids), len(completion.logprobs), len(completion.versions)
        if len(set(lengths)) > 1 or lengths[0] > request.max_tokens:
            raise PluginError(
                f"engine: generate() returned {lengths[0]} token ids, {lengths[1]} logprobs and {lengths[2]} "
                f"versions; expected as many of each, and at most max_tokens = {request.max_tokens}"
            )
        if not all(-math.inf < logprob <= LOGPROB_SLACK for logprob in completion.logprobs):
            wrong = next(x for x in completion.logprobs if not -math.inf < x <= LOGPROB_SLACK)
            raise PluginError(
                f"engine: generate() returned the logprob {wrong} for a sampled token; expected a finite "
                "number of at most 0"
            )
