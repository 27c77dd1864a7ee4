"""Losses of published methods, with the options that all losses share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import grpo_core as grpo
from grpo_plugin_algorithms.clipped import clipped_objective
from grpo_plugin_algorithms.ranges import POSITIVE, SHARE, Range
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

    With r = policy / proximal and A = log teacher - log proximal, a token's loss is::

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
        clip_high: the ratio is clipped above 1 plus this; 4 caps it at 5.
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
        temperature_positive: t of tokens with a positive advantage; a higher t makes the gate narrower.
        temperature_negative: t of the other tokens.
    """
    r = policy_ratio(inputs.policy_logprobs, inputs.proximal_logprobs, inputs.sequences, ratio)
    advantages = inputs.advantages
    t = advantages.new_full((), temperature_positive).where(advantages > 0, temperature_negative)
    losses = -(t * (r - 1)).sigmoid() * 4 / t * advantages
    return Objective(losses=weights * losses, ratio=r, metrics={})


@composed(lacks=["ratio", "proximal"])
def reinforce(inputs: grpo.LossInputs, weights: Tensor) -> Objective:
    """Policy gradient without a clip (REINFORCE; with leave-one-out advantages RLOO, arXiv 2402.14740).

    A token's loss is::

        - w A log policy

    There is no ratio that bounds the change of the policy: use one update (``trainer.updates_per_step = 1``).

    Args:
        inputs: the sampled tokens of one micro-batch.
        weights: importance weights of the tokens.
    """
    losses = weights * -inputs.advantages * inputs.policy_logprobs
    return Objective(losses=losses, metrics={})
