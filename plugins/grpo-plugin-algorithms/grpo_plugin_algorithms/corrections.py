"""Importance weights and masks for tokens sampled by older weights or by an engine with other numerics."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from grpo_core.losses import bounded_exp
from grpo_plugin_algorithms.tensors import means, sums

if TYPE_CHECKING:
    from torch import Tensor

Correction = Literal[
    "off", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask", "geometric_mask"
]
BY_SEQUENCE = ("sequence_truncate", "sequence_mask", "geometric_mask")
"""Corrections that need all tokens of each sequence in the micro-batch."""


def importance_weights(
    proximal: Tensor,
    generation: Tensor,
    sequences: Tensor,
    correction: Correction = "token_truncate",
    *,
    low: float = 0.0,
    high: float = 2.0,
) -> Tensor:
    """Compute the weight w of each token, without gradient.

    With r = proximal / generation of a token, and R the product of r over its sequence::

        off                w = 1
        token_truncate     w = clip(r, low, high)            truncated IS (TIS; IMPALA, arXiv 1802.01561)
        token_mask         w = r if low <= r <= high else 0  IcePop
        sequence_truncate  w = clip(R, low, high)            truncated IS of sequences
        sequence_mask      w = R if low <= R <= high else 0  masked IS of sequences
        geometric_mask     w = r if low <= R^(1 / L) <= high else 0, with L the tokens of the sequence

    Args:
        proximal: logprobs [N] by the trainer.
        generation: logprobs [N] by the engine that sampled.
        sequences: index [N] of each token's sequence; the last three corrections need whole sequences.
        correction: name of the correction, as above.
        low: lower bound.
        high: upper bound.
    """
    log_ratio = (proximal - generation).detach()
    ratio = bounded_exp(log_ratio)
    if correction == "off":
        return ratio.new_ones(ratio.shape)
    if correction == "token_truncate":
        return ratio.clamp(low, high) if low > 0 else ratio.clamp(max=high)
    if correction == "token_mask":
        return ratio.where((ratio >= low) & (ratio <= high), 0.0)
    if correction == "geometric_mask":
        mean = bounded_exp(means(log_ratio, sequences))
        return ratio.where((mean >= low) & (mean <= high), 0.0)
    product = bounded_exp(sums(log_ratio, sequences))
    if correction == "sequence_truncate":
        return product.clamp(low, high)
    return product.where((product >= low) & (product <= high), 0.0)


def off_policy_kept(
    policy: Tensor, generation: Tensor, advantages: Tensor, sequences: Tensor, *, limit: float
) -> Tensor:
    """Return a mask [N] of the tokens with an advantage of at least 0 or a sequence near the policy.

    A sequence is near if the mean of generation - policy over its tokens is at most ``limit`` (nats per
    token): the off-policy sequence mask of DeepSeek-V3.2 (arXiv 2512.02556).
    """
    distance = means((generation - policy).detach(), sequences)
    return (advantages >= 0) | (distance <= limit)
