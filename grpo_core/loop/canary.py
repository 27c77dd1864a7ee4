"""The canary: checks after each weight sync that the engine uses the weights that it holds.

Checksums show that the bytes arrived.  Only a forward pass shows that they are *used*: that no tensor went to
another name, that no prefix cache keeps keys and values of older weights, that no copy was rolled back.  With
each version the trainer publishes its own logprobs for a few prompts.  The engine completes them greedily by
one token, and its logprob must equal the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence

from grpo_core import aio
from grpo_core.completions import check_completions
from grpo_core.errors import ChildDied, EngineError, WeightSyncError
from grpo_core.protocols import Engine
from grpo_core.records import Canary, Completion, GenerationRequest, Weights
from grpo_core.restarts import RestartBudget

FINE, COARSE = 1e-3, 0.1
"""Differences of logprobs that rounding explains: of float32, and of bfloat16 on either side."""
SIXTEEN_BITS = ("bfloat16", "float16")
MAX_FAILURES = 3
"""Failures in a row after which the canary gives up: an engine may die while it is asked, and hold the
weights again when it is asked again."""


async def verify(engine: Engine, weights: Weights, *, tolerance: float, deadline: float | None) -> float:
    """Return the largest difference between the engine's and the trainer's logprobs; 0 without a canary.

    A ``tolerance`` of 0 stands for the one that the dtype of the weights explains, or the ``dtype`` that the
    engine says.  Raises WeightSyncError if the difference is above it, if the engine answers with another
    version, or if it does not answer within ``deadline`` seconds; EngineError if the engine fails.
    """
    if not weights.canary:
        return 0.0
    requests = [
        GenerationRequest(prompt_ids=canary.prompt_ids, max_tokens=1, temperature=0.0)
        for canary in weights.canary
    ]

    def late() -> WeightSyncError:
        return WeightSyncError(
            f"engine: no answer to the canary of version {weights.version} within {deadline:g} s "
            "(engine.deadline); it may be frozen"
        )

    async with aio.deadline(deadline, late):
        completions = await _ask(engine, requests)
    check_completions(completions, requests)
    tolerance = tolerance or _explained(engine, weights)
    pairs = zip(weights.canary, completions, strict=True)
    differences = [_difference(weights.version, *pair, tolerance) for pair in pairs]
    return max(differences)


def _explained(engine: Engine, weights: Weights) -> float:
    """Return the difference that rounding explains, of the weights or of an engine that rounds them."""
    rounded = any(info.dtype != "float32" for info in weights.tensors)
    return COARSE if rounded or getattr(engine, "dtype", "") in SIXTEEN_BITS else FINE


async def _ask(engine: Engine, requests: Sequence[GenerationRequest]) -> list[Completion]:
    return await RestartBudget(MAX_FAILURES).run(
        lambda: engine.generate(requests), on=(EngineError, ChildDied)
    )


def _difference(version: int, canary: Canary, completion: Completion, tolerance: float) -> float:
    versions = completion.versions.tolist()
    if versions != [version]:
        raise WeightSyncError(
            f"engine: after the sync of version {version} it completed the canary with versions "
            f"{versions}; expected [{version}]"
        )
    (token,), (engine,) = completion.token_ids.tolist(), completion.logprobs.tolist()
    known = dict(zip(canary.token_ids, canary.logprobs, strict=True))
    trainer = known.get(token)
    difference = abs(engine - trainer) if trainer is not None else float("inf")
    if difference <= tolerance:
        return difference
    said = f"{trainer:.6f}" if trainer is not None else "less than to its likeliest tokens"
    raise WeightSyncError(
        f"engine: it does not use the weights of version {version}: to token {token} after a canary prompt "
        f"of {len(canary.prompt_ids)} tokens it gives the logprob {engine:.6f}, the trainer {said} "
        f"(tolerance {tolerance:g}). The tensors arrived as the trainer wrote them, so look at what the "
        "engine does with them: a cache of older weights, tensors under other names, another dtype "
        "(health.canary_tolerance)"
    )
