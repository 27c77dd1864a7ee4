"""Objectives of policy gradients: one loss for each token, from ratios and advantages.

The functions take plain tensors [N] and return losses to minimise, without correction and without averaging.
r is a ratio of ``grpo_core.losses.policy_ratio``, A the advantage, and sg stops the gradient.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from grpo_core.losses._tensors import LIMIT, sums

if TYPE_CHECKING:
    from torch import Tensor


def clipped_loss(
    ratio: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> Tensor:
    """Compute - min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) (PPO, arXiv 1707.06347 eq. 7).

    Different bounds are DAPO's clip-higher (arXiv 2503.14476).  ``dual_clip`` = c > 1 bounds the loss of a
    negative advantage by - c A (arXiv 1912.09729).  ``ratio_cap`` = d bounds r by d in the unclipped branch:
    the two-sided clip of INTELLECT-2 (arXiv 2505.07291), TRL's ``delta``.
    """
    capped = ratio if ratio_cap is None else ratio.clamp(max=ratio_cap)
    objective = (capped * advantages).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        objective = objective.maximum(dual_clip * advantages).where(advantages < 0, objective)
    return -objective


def cispo_loss(
    ratio: Tensor, advantages: Tensor, policy: Tensor, *, clip_low: float = 1.0, clip_high: float = 4.0
) -> Tensor:
    """Compute - sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy (MiniMax-M1, arXiv 2506.13585 eq. 4).

    The ratio is a weight without gradient, so every token keeps its gradient.
    """
    return -ratio.clamp(1 - clip_low, 1 + clip_high).detach() * advantages * policy


def sapo_loss(
    ratio: Tensor,
    advantages: Tensor,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Tensor:
    """Compute - 4 / t sigmoid(t (r - 1)) A, a soft clip (SAPO, arXiv 2511.20347).

    t is ``temperature_positive`` where A > 0, otherwise ``temperature_negative``.  Around r = 1 the gradient
    is that of r A.
    """
    temperature = advantages.new_full((), temperature_positive).where(advantages > 0, temperature_negative)
    return -(temperature * (ratio - 1)).sigmoid() * 4 / temperature * advantages


def vespo_weights(
    log_ratio: Tensor,
    weights: Tensor,
    advantages: Tensor,
    sequences: Tensor,
    *,
    positive: tuple[float, float] = (2.0, 3.0),
    negative: tuple[float, float] = (3.0, 2.0),
) -> Tensor:
    """Compute phi(W) = exp(lambda) W^k exp(- lambda W) of each token's sequence, without gradient.

    W is the product over the sequence of policy / proximal and of the token's importance weight; (k, lambda)
    is ``positive`` where A >= 0, otherwise ``negative``.  phi(1) = 1.  Logarithms are limited to
    [log 1e-8, 20], and those of policy / proximal to [-20, 20].
    """
    least = math.log(1e-8)
    log_ratio, log_weights = log_ratio.detach().clamp(-LIMIT, LIMIT), weights.log().clamp(least, LIMIT)
    log_product = (sums(log_ratio, sequences) + sums(log_weights, sequences)).clamp(least, LIMIT)
    right = advantages >= 0
    k = advantages.new_full((), positive[0]).where(right, negative[0])
    rate = advantages.new_full((), positive[1]).where(right, negative[1]).clamp(min=1e-4)
    return (rate + k * log_product - rate * log_product.exp()).exp()


def vespo_loss(phi: Tensor, advantages: Tensor, policy: Tensor) -> Tensor:
    """Compute - phi A log policy (VESPO, arXiv 2602.10693), with phi of ``vespo_weights``."""
    return -phi * advantages * policy


def reinforce_loss(policy: Tensor, advantages: Tensor) -> Tensor:
    """Compute - A log policy (REINFORCE; with leave-one-out advantages RLOO, arXiv 2402.14740)."""
    return -advantages * policy


def dppo_kept(
    policy: Tensor, generation: Tensor, advantages: Tensor, *, mask_low: float = 0.2, mask_high: float = 0.2
) -> Tensor:
    """Whether each token is trained: its probability has not moved too far where its advantage pushes it.

    A token is dropped if A > 0 and policy - generation > ``mask_high``, or if A <= 0 and policy - generation
    < - ``mask_low``; these are probabilities: the binary total variation (DPPO, arXiv 2602.04879).
    """
    moved = (policy.exp() - generation.exp()).detach()
    return ~(((advantages > 0) & (moved > mask_high)) | ((advantages <= 0) & (moved < -mask_low)))
