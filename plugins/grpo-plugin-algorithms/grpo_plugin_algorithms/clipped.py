"""The core's loss ``grpo``, with the additional options that all losses of this plugin share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from grpo_core import LossInputs
from grpo_plugin_algorithms.ranges import SHARE, Range
from grpo_plugin_algorithms.ratios import policy_ratio
from grpo_plugin_algorithms.terms import Objective, composed

if TYPE_CHECKING:
    from torch import Tensor

CAP = Range(above=1, why="or it would remove the gradient at ratio 1")


@composed(
    within={
        "clip_low": SHARE,
        "clip_high": Range(at_least=0, infinite=True),
        "dual_clip": CAP,
        "ratio_cap": CAP,
    }
)
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
    return clipped_objective(
        inputs,
        weights,
        ratio,
        clip_low=clip_low,
        clip_high=clip_high,
        dual_clip=dual_clip,
        ratio_cap=ratio_cap,
    )


def clipped_objective(
    inputs: LossInputs,
    weights: Tensor,
    ratio: Literal["token", "sequence", "sequence_token"] = "token",
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    ratio_cap: float | None = None,
) -> Objective:
    """Compute the clipped objective with one of the ratios, and the fractions of clipped tokens."""
    advantages = inputs.advantages
    r = policy_ratio(inputs.policy_logprobs, inputs.proximal_logprobs, inputs.sequences, ratio)
    capped = r if ratio_cap is None else r.clamp(max=ratio_cap)
    objective = (capped * advantages).minimum(r.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        objective = objective.maximum(dual_clip * advantages).where(advantages < 0, objective)
    metrics = {
        "clip_fraction_low": ((r < 1 - clip_low) & (advantages < 0)).to(r.dtype),
        "clip_fraction_high": ((r > 1 + clip_high) & (advantages > 0)).to(r.dtype),
    }
    return Objective(losses=weights * -objective, ratio=r, metrics=metrics)
