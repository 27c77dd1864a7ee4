"""Losses of published methods, with the options that all losses share."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

import grpo_core as grpo
from grpo_core.losses import LARGEST_LOG_RATIO
from grpo_plugin_algorithms.clipped import clipped_objective
from grpo_plugin_algorithms.ranges import NOT_NEGATIVE, POSITIVE, SHARE, Range
from grpo_plugin_algorithms.ratios import policy_ratio
from grpo_plugin_algorithms.terms import Objective, composed

if TYPE_CHECKING:
    from torch import Tensor

CLIP = {"clip_low": SHARE, "clip_high": Range(at_least=0, infinite=True)}


@composed(defaults={"teacher_coefficient": 1.0, "reward_coefficient": 0.0}, within=CLIP)
def distillation(
    inputs: grpo.LossInputs, weights: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Objective:
    """On-policy distillation: the teacher's logprobs are the advantages of the policy's own tokens.

    With r = policy / proximal and A = log teacher - log proximal, a token's loss is that of ``grpo``::

        - w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    The mean of - A estimates the reverse KL divergence from the policy to the teacher (GKD with the reverse
    KL on samples of the student, arXiv 2306.13649; MiniLLM, arXiv 2306.08543).  Rewards count with
    ``reward_coefficient``.

    Args:
        inputs: the sampled tokens of one micro-batch.
        weights: importance weights of the tokens.
        clip_low: the ratio of a token with a negative advantage is clipped below 1 minus this.
        clip_high: the ratio of a token with a positive advantage is clipped above 1 plus this.
    """
    return clipped_objective(inputs, weights, "token", clip_low=clip_low, clip_high=clip_high)


@grpo.needs("sequences")
@composed(within=CLIP)
def gspo(
    inputs: grpo.LossInputs, weights: Tensor, *, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> Objective:
    """Clipped policy gradient with one ratio for each rollout (GSPO, arXiv 2507.18071 eq. 5).

    With s the geometric mean of policy / proximal over the tokens of the rollout, a token's loss is::

        - w min(s A, clip(s, 1 - clip_low, 1 + clip_high) A)

    The paper averages over rollouts: ``loss.aggregation = "sequence"``.

    Args:
        inputs: the sampled tokens of one micro-batch, whose rollouts are whole.
        weights: importance weights of the tokens.
        clip_low: the ratio of a rollout with a negative advantage is clipped below 1 minus this.
        clip_high: the ratio of a rollout with a positive advantage is clipped above 1 plus this.
    """
    return clipped_objective(inputs, weights, "sequence", clip_low=clip_low, clip_high=clip_high)


@composed(within=CLIP)
def cispo(
    inputs: grpo.LossInputs,
    weights: Tensor,
    *,
    ratio: Literal["token", "sequence"] = "token",
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Objective:
    """Policy gradient whose clipped ratio is a weight, so that no token loses its gradient (CISPO).

    With r = policy / proximal, and sg the stopped gradient, a token's loss is::

        - w sg(clip(r, 1 - clip_low, 1 + clip_high)) A log policy

    (MiniMax-M1, arXiv 2506.13585 eq. 4).  With the default ``clip_low`` = 1 there is no lower bound.

    Args:
        inputs: the sampled tokens of one micro-batch.
        weights: importance weights of the tokens.
        ratio: "token", or the geometric mean over the rollout ("sequence").
        clip_low: the ratio is clipped below 1 minus this.
        clip_high: the ratio is clipped above 1 plus this; a cap of 5 is 4.
    """
    r = policy_ratio(inputs.policy_logprobs, inputs.proximal_logprobs, inputs.sequences, ratio)
    factor = r.clamp(1 - clip_low, 1 + clip_high).detach()
    losses = -factor * inputs.advantages * inputs.policy_logprobs
    metrics = {
        "clip_fraction_low": (r < 1 - clip_low).to(r.dtype),
        "clip_fraction_high": (r > 1 + clip_high).to(r.dtype),
    }
    return Objective(losses=weights * losses, ratio=r, metrics=metrics)


@composed(within={"temperature_positive": POSITIVE, "temperature_negative": POSITIVE})
def sapo(
    inputs: grpo.LossInputs,
    weights: Tensor,
    *,
    ratio: Literal["token", "sequence"] = "token",
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> Objective:
    """Policy gradient with a soft gate instead of a clip (SAPO, arXiv 2511.20347).

    With r = policy / proximal, and t the temperature for the sign of the advantage, a token's loss is::

        - w 4 / t sigmoid(t (r - 1)) A

    Args:
        inputs: the sampled tokens of one micro-batch.
        weights: importance weights of the tokens.
        ratio: "token", or the geometric mean over the rollout ("sequence").
        temperature_positive: t of a token with a positive advantage; the higher it is, the narrower is the
        gate.
        temperature_negative: t of the other tokens.
    """
    r = policy_ratio(inputs.policy_logprobs, inputs.proximal_logprobs, inputs.sequences, ratio)
    advantages = inputs.advantages
    t = advantages.new_full((), temperature_positive).where(advantages > 0, temperature_negative)
    losses = -(t * (r - 1)).sigmoid() * 4 / t * advantages
    return Objective(losses=weights * losses, ratio=r, metrics={})


@grpo.needs("sequences")
@composed(
    allowed={"correction": ("off", "token_truncate", "token_mask")},
    within={
        "k_positive": NOT_NEGATIVE,
        "lambda_positive": POSITIVE,
        "k_negative": NOT_NEGATIVE,
        "lambda_negative": POSITIVE,
    },
)
def vespo(
    inputs: grpo.LossInputs,
    weights: Tensor,
    *,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> Objective:
    """Policy gradient with a smooth weight of the whole rollout's ratio (VESPO, arXiv 2602.10693).

    With W the product over the rollout of policy / proximal and of the importance weights, a token's loss
    is::

        - sg(phi(W)) A log policy,  phi(W) = exp(lambda) W^k exp(- lambda W)

    Args:
        inputs: the sampled tokens of one micro-batch, whose rollouts are whole.
        weights: importance weights of the tokens, a part of W.
        k_positive: k where the advantage is at least 0.
        lambda_positive: lambda where the advantage is at least 0.
        k_negative: k where the advantage is negative.
        lambda_negative: lambda where the advantage is negative.
    """
    log_ratio = inputs.policy_logprobs - inputs.proximal_logprobs
    phi = vespo_weights(
        log_ratio,
        weights,
        inputs.advantages,
        inputs.sequences,
        positive=(k_positive, lambda_positive),
        negative=(k_negative, lambda_negative),
    )
    losses = -phi * inputs.advantages * inputs.policy_logprobs
    ratio = policy_ratio(inputs.policy_logprobs, inputs.proximal_logprobs, inputs.sequences)
    return Objective(losses=losses, ratio=ratio, metrics={"sequence_weight": phi})


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
    log_ratio = log_ratio.detach().clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    log_weights = weights.log().clamp(least, LARGEST_LOG_RATIO)
    n = int(sequences.max()) + 1 if sequences.numel() else 0
    product = log_ratio.new_zeros(n).index_add(0, sequences, log_ratio + log_weights)[sequences]
    log_product = product.clamp(least, LARGEST_LOG_RATIO)
    right = advantages >= 0
    k = advantages.new_full((), positive[0]).where(right, negative[0])
    rate = advantages.new_full((), positive[1]).where(right, negative[1]).clamp(min=1e-4)
    return (rate + k * log_product - rate * log_product.exp()).exp()


@composed(lacks=["ratio", "proximal"])
def reinforce(inputs: grpo.LossInputs, weights: Tensor) -> Objective:
    """Policy gradient without a clip (REINFORCE; with leave-one-out advantages RLOO, arXiv 2402.14740).

    A token's loss is::

        - w A log policy

    No ratio bounds how far a step moves: it makes one update (``trainer.updates_per_step = 1``).

    Args:
        inputs: the sampled tokens of one micro-batch.
        weights: importance weights of the tokens.
    """
    losses = weights * -inputs.advantages * inputs.policy_logprobs
    return Objective(losses=losses, metrics={})


@composed(
    defaults={"correction": "off"},
    allowed={"correction": ("off",), "on_policy": (False,)},
    within={"mask_low": SHARE, "mask_high": SHARE, "drift_coefficient": NOT_NEGATIVE},
    lacks=["proximal"],
)
def dppo(
    inputs: grpo.LossInputs,
    weights: Tensor,
    *,
    mask_low: float = 0.2,
    mask_high: float = 0.2,
    drift_coefficient: float = 1e-3,
) -> Objective:
    """Policy gradient that drops tokens whose probability has moved too far (DPPO, arXiv 2602.04879).

    With r = policy / generation, a token's loss is::

        - keep r A + drift_coefficient (log r)^2

    keep is 0 if A > 0 and policy - generation > ``mask_high``, or if A <= 0 and policy - generation < -
    ``mask_low``, as probabilities; otherwise 1.  prime-rl trains with this loss.

    Args:
        inputs: the sampled tokens of one micro-batch.
        weights: importance weights of the tokens; 1.
        mask_low: how much less likely a token without a positive advantage may be than when it was sampled.
        mask_high: how much likelier a token with a positive advantage may be than when it was sampled.
        drift_coefficient: factor of the squared log ratio of every token.
    """
    policy, generation, advantages = inputs.policy_logprobs, inputs.generation_logprobs, inputs.advantages
    r = policy_ratio(policy, generation, inputs.sequences)
    kept = dppo_kept(policy, generation, advantages, mask_low=mask_low, mask_high=mask_high)
    losses = weights * -(r * advantages).where(kept, 0.0) + drift_coefficient * (policy - generation).square()
    metrics = {
        "clip_fraction_low": (~kept & (advantages < 0)).to(r.dtype),
        "clip_fraction_high": (~kept & (advantages > 0)).to(r.dtype),
    }
    return Objective(losses=losses, ratio=r, metrics=metrics)


def dppo_kept(
    policy: Tensor, generation: Tensor, advantages: Tensor, *, mask_low: float = 0.2, mask_high: float = 0.2
) -> Tensor:
    """Whether each token is trained: its probability has not moved too far where its advantage pushes it.

    A token is dropped if A > 0 and policy - generation > ``mask_high``, or if A <= 0 and policy - generation
    < - ``mask_low``; these are probabilities: the binary total variation (DPPO, arXiv 2602.04879).
    """
    moved = (policy.exp() - generation.exp()).detach()
    return ~(((advantages > 0) & (moved > mask_high)) | ((advantages <= 0) & (moved < -mask_low)))
