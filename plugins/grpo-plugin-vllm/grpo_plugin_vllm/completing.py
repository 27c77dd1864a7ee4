"""Conversion of requests and completions to and from vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from grpo_core import Completion, EngineError, FinishReason, GenerationRequest
from grpo_core.kit import services

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput

EMPTY = Completion(token_ids=(), logprobs=(), versions=(), finish_reason="length")
"""Completion of a request for 0 tokens, which vLLM does not accept."""


def sampling(request: GenerationRequest, *, seeds: bool) -> dict[str, Any]:
    """Return the options of ``vllm.SamplingParams`` for a request, without defaults of the model."""
    return {
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "seed": request.seed % 2**63 if seeds and request.temperature else None,
        "stop": list(request.stop),
        "stop_token_ids": list(request.stop_token_ids),
        "ignore_eos": True,  # only the renderer's stop tokens count
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "detokenize": bool(request.stop),
        "logprobs": 0,  # for the sampled token only
    }


def parameters(request: GenerationRequest, *, seeds: bool) -> SamplingParams:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **sampling(request, seeds=seeds),
        flat_logprobs=True,
        watermarking=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def completion(output: RequestOutput) -> Completion:
    """Convert vLLM's output.  Raises EngineError if a token lacks its version or logprob."""
    (only,) = output.outputs
    spans = only.weight_versions or []
    return checked(
        token_ids=only.token_ids,
        logprobs=only.logprobs.logprobs,
        spans=[(int(span.version), span.start, span.end) for span in spans],
        finish_reason=only.finish_reason,
    )


def checked(
    *,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    spans: Sequence[tuple[int, int, int]],
    finish_reason: Any,
) -> Completion:
    """Return a completion.  Raises EngineError unless each token has one logprob and one version.

    Args:
        spans: versions with the index of their first token and the index after their last token.
    """
    # validate before allocating arrays, since a server could send any length
    lengths = [end - start for _, start, end in spans]
    borders = [0, *(end for _, _, end in spans)]
    in_order = [start for _, start, _ in spans] == borders[:-1] and borders[-1] == len(token_ids)
    if (
        len(token_ids) != len(logprobs)
        or not in_order
        or min(lengths, default=0) < 0
        or finish_reason not in ("stop", "length")
    ):
        held, why = services.said(str([span[1:] for span in spans])), services.said(repr(finish_reason))
        raise EngineError(
            f"engine vllm: {len(token_ids)} tokens, {len(logprobs)} logprobs, versions of the tokens "
            f"{held}, finish reason {why}; "
            "expected one of each for each token, in order, and stop or length"
        )
    versions = np.repeat(np.array([version for version, _, _ in spans], np.int32), lengths)
    reason: FinishReason = finish_reason
    return Completion(
        token_ids=list(token_ids), logprobs=list(logprobs), versions=versions, finish_reason=reason
    )
