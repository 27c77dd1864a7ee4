"""The default loss: the clipped policy gradient of GRPO, corrected for older weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from attrs import field, frozen
from attrs.validators import ge, gt, lt

from grpo_core.contracts.loss import LossInputs, LossSetting, Remark, options_checked_by

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_core.contracts.loss import LossOutput

LARGEST_LOG_RATIO = 20.0
"""Largest log ratio: exp(20) is finite, but too large a weight to learn from."""
IDLE_CLIP = Remark(
    "loss.options.clip_low and clip_high do nothing: with trainer.updates_per_step = 1 the policy has not "
    "moved yet when a batch is trained"
)


@frozen(kw_only=True)
class TokenTruncate:
    """Truncated importance sampling: the weight of a token is min(proximal / generation, ``cap``)."""

    cap: float = field(default=2.0, validator=gt(0))
    """Upper bound of the importance weight."""


@frozen(kw_only=True)
class Kl:
    """The KL divergence to the reference model, a term of the loss."""

    coefficient: float = field(default=0.0, validator=[ge(0), lt(float("inf"))])
    """Factor of the divergence; 0 needs no reference model."""

    @property
    def needs(self) -> tuple[str, ...]:
        return ("scores.reference", "all_rows") if self.coefficient else ()


def _problems(given: Mapping[str, Any], setting: LossSetting) -> Iterator[str | Remark]:
    """Yield the options that are out of range or have no effect."""
    for name, most in (("clip_low", 1), ("clip_high", float("inf"))):
        if not 0 <= given.get(name, 0) <= most:
            yield f"{name} = {given[name]}: expected 0 to {most}"
    if "correction" in given and setting.proximal == "generation":
        yield "correction does nothing: with trainer.proximal = 'generation' its weight is 1; leave it out"
    clips = {"clip_low", "clip_high"} & given.keys()
    if clips and setting.updates_per_step == 1 and setting.proximal == "recompute":
        yield IDLE_CLIP


@options_checked_by(_problems)
def grpo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    correction: TokenTruncate = TokenTruncate(),
    kl: Kl = Kl(),
) -> LossOutput:
    """Clipped policy gradient with a correction for tokens that older weights sampled.

    With r = policy / proximal, w = min(proximal / generation, ``cap``) and advantage A, a token's loss is::

        - w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    the decoupled objective (AReaL, arXiv 2505.24298 eq. 5) with a truncated importance weight (IMPALA, arXiv
    1802.01561).  The clip bounds how far a step moves from its start; the weight corrects for the sampling
    policy.  Where proximal is generation, w is 1 and this is PPO's objective (arXiv 1707.06347 eq. 7); an
    asymmetric clip is DAPO's (arXiv 2503.14476).  ``grpo-plugin-algorithms`` replaces this loss by one with
    the same results and more options.

    Metrics: ``clip_fraction_low``, ``clip_fraction_high`` (tokens whose gradient the clip removes),
    ``importance_weight_mean``, ``importance_weight_max`` (after the bound), ``kl``.

    Args:
        inputs: the sampled tokens of one micro-batch.
        clip_low: the ratio of a token with a negative advantage is clipped below 1 minus this.
        clip_high: the ratio of a token with a positive advantage is clipped above 1 plus this.
        correction: the importance weight.
        kl: the KL divergence to the reference model.
    """
    policy, proximal, advantages = inputs.policy_logprobs, inputs.proximal_logprobs, inputs.advantages
    ratio = bounded_exp(policy - proximal)
    weights = bounded_exp((proximal - inputs.generation_logprobs).detach()).clamp(max=correction.cap)
    objective = (ratio * advantages).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    losses = -weights * objective
    metrics = {
        "clip_fraction_low": ((ratio < 1 - clip_low) & (advantages < 0)).to(ratio.dtype),
        "clip_fraction_high": ((ratio > 1 + clip_high) & (advantages > 0)).to(ratio.dtype),
        "importance_weight_mean": weights,
        "importance_weight_max": weights,
    }
    if kl.coefficient:
        divergence = _kl(policy, inputs.scores["reference"])
        losses = losses + kl.coefficient * divergence
        metrics["kl"] = divergence.detach()
    return losses, metrics


def _kl(policy: Tensor, reference: Tensor) -> Tensor:
    """Estimate KL(policy, reference) by exp(d) - d - 1 with d = reference - policy (http://joschu.net).

    It is weighted by 1 with the gradient of the logprobs, so that its gradient equals the divergence's
    (arXiv 2506.09477).
    """
    d = (reference - policy).clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    return bounded_exp(policy - policy.detach()) * (d.exp() - d - 1)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Compute exp of a log ratio within ``LARGEST_LOG_RATIO``."""
    return log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
