"""The losses of the core: objectives of published methods, with the options that all of them share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from grpo_core.loss import LossInputs, needs
from grpo_core.losses._tensors import bounded_exp
from grpo_core.losses.objectives import (
    cispo_loss,
    clipped_loss,
    dppo_kept,
    reinforce_loss,
    sapo_loss,
    vespo_loss,
    vespo_weights,
)
from grpo_core.losses.ranges import NOT_NEGATIVE, POSITIVE, SHARE, Range
from grpo_core.losses.ratios import policy_ratio
from grpo_core.losses.terms import Objective, composed

if TYPE_CHECKING:
    from torch import Tensor

CLIP = {"clip_low": SHARE, "clip_high": Range(at_least=0, infinite=True)}
CAP = Range(above=1, why="or it would remove the gradient at ratio 1")


@composed(within={**CLIP, "dual_clip": CAP, "ratio_cap": CAP})
def grpo(
    inputs: LossInputs,
    weights: Tensor,
    *,
    ratio: Literal["token", "sequence", "sequence_token"] = "token",
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> Objective:
    """Clipped policy gradient with a correction for tokens that older weights sampled.

    With r = policy / proximal, w = min(proximal / generation, ``importance_cap``) and advantage A, a
    token's loss is::

        - w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    the decoupled objective (AReaL, arXiv 2505.24298 eq. 5) with a truncated importance weight (IMPALA, arXiv
    1802.01561).  The clip bounds how far a step moves from where it began, the weight corrects for who
    sampled.  Where proximal is generation, w is 1 and this is PPO's objective (arXiv 1707.06347 eq. 7); an
    asymmetric clip is DAPO's (arXiv 2503.14476).  ``dual_clip`` = c > 1 bounds the loss of a negative
    advantage by - c A (arXiv 1912.09729), ``ratio_cap`` the ratio of the unclipped branch (arXiv 2505.07291).

    Metrics: ``clip_fraction_low``, ``clip_fraction_high`` (tokens whose gradient the clip removes),
    ``importance_weight_mean``, ``importance_weight_max`` (after the bounds), ``kl``.

    Args:
        inputs: the sampled tokens of one micro-batch.
        weights: importance weights of the tokens.
        ratio: "token", the geometric mean over the rollout ("sequence", GSPO), or its value with the
            gradient of the token ("sequence_token").
        clip_low: the ratio of a token with a negative advantage is clipped below 1 minus this.
        clip_high: the ratio of a token with a positive advantage is clipped above 1 plus this.
        dual_clip: bounds the loss of a negative advantage by this times the advantage; more than 1.  None
            does not bound it.
        ratio_cap: bounds the ratio of the unclipped branch, for both signs of the advantage; more than 1.
    """
    return _clipped(
        inputs,
        weights,
        ratio,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        ratio_cap=ratio_cap,
    )


@composed(defaults={"teacher_coefficient": 1.0, "reward_coefficient": 0.0}, within=CLIP)
def distillation(
    inputs: LossInputs, weights: Tensor, *, clip_low: float = 0.2, clip_high: float = 0.2
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
    return _clipped(inputs, weights, "token", clip_low=clip_low, clip_high=clip_high)


@needs("sequences")
@composed(within=CLIP)
def gspo(
    inputs: LossInputs, weights: Tensor, *, clip_low: float = 3e-4, clip_high: float = 4e-4
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
    return _clipped(inputs, weights, "sequence", clip_low=clip_low, clip_high=clip_high)


def _clipped(
    inputs: LossInputs,
    weights: Tensor,
    ratio: Literal["token", "sequence", "sequence_token"],
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> Objective:
    """Compute the clipped objective with one of the ratios, and how often its clip removes the gradient."""
    advantages = inputs.advantages
    r = policy_ratio(inputs.policy_logprobs, inputs.proximal_logprobs, inputs.sequences, ratio)
    losses = clipped_loss(
        r, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip, ratio_cap=ratio_cap
    )
    metrics = {
        "clip_fraction_low": ((r < 1 - clip_low) & (advantages < 0)).to(r.dtype),
        "clip_fraction_high": ((r > 1 + clip_high) & (advantages > 0)).to(r.dtype),
    }
    return Objective(losses=weights * losses, ratio=r, metrics=metrics)


@composed(within=CLIP)
def cispo(
    inputs: LossInputs,
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
    losses = cispo_loss(r, inputs.advantages, inputs.policy_logprobs, clip_low=clip_low, clip_high=clip_high)
    metrics = {
        "clip_fraction_low": (r < 1 - clip_low).to(r.dtype),
        "clip_fraction_high": (r > 1 + clip_high).to(r.dtype),
    }
    return Objective(losses=weights * losses, ratio=r, metrics=metrics)


@composed(within={"temperature_positive": POSITIVE, "temperature_negative": POSITIVE})
def sapo(
    inputs: LossInputs,
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
    losses = sapo_loss(
        r,
        inputs.advantages,
        temperature_positive=temperature_positive,
        temperature_negative=temperature_negative,
    )
    return Objective(losses=weights * losses, ratio=r, metrics={})


@needs("sequences")
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
    inputs: LossInputs,
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
    losses = vespo_loss(phi, inputs.advantages, inputs.policy_logprobs)
    return Objective(losses=losses, ratio=bounded_exp(log_ratio), metrics={"sequence_weight": phi})


@composed(lacks=["ratio", "proximal"])
def reinforce(inputs: LossInputs, weights: Tensor) -> Objective:
    """Policy gradient without a clip (REINFORCE; with leave-one-out advantages RLOO, arXiv 2402.14740).

    A token's loss is::

        - w A log policy

    No ratio bounds how far a step moves: it makes one update (``trainer.updates_per_step = 1``).

    Args:
        inputs: the sampled tokens of one micro-batch.
        weights: importance weights of the tokens.
    """
    losses = weights * reinforce_loss(inputs.policy_logprobs, inputs.advantages)
    return Objective(losses=losses, metrics={})


@composed(
    defaults={"correction": "off"},
    allowed={"correction": ("off",), "on_policy": (False,)},
    within={"mask_low": SHARE, "mask_high": SHARE, "drift_coefficient": NOT_NEGATIVE},
    lacks=["proximal"],
)
def dppo(
    inputs: LossInputs,
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
    log_ratio = policy - generation
    r = bounded_exp(log_ratio)
    kept = dppo_kept(policy, generation, advantages, mask_low=mask_low, mask_high=mask_high)
    losses = weights * -(r * advantages).where(kept, 0.0) + drift_coefficient * log_ratio.square()
    metrics = {
        "clip_fraction_low": (~kept & (advantages < 0)).to(r.dtype),
        "clip_fraction_high": (~kept & (advantages > 0)).to(r.dtype),
    }
    return Objective(losses=losses, ratio=r, metrics=metrics)
