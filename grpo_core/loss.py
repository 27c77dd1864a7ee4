"""Losses: from the logprobs of the sampled tokens to what the optimizer descends.

A loss is a function of ``LossInputs`` and its own options that returns one loss and any number of metrics
for each sampled token.  It never averages: the core sums over everything that one optimizer update
consists of and divides by its number of sampled tokens, so the gradient does not depend on how the rows
were split, padded or ordered.  A loss that works on sequences sums over ``rows``, which are whole within
one call.

    def reinforce(inputs: LossInputs) -> LossOutput:
        return -inputs.advantages * inputs.policy_logprobs, {}

Metrics of an update are means over its sampled tokens; a name that ends in ``_max`` is a maximum.  A loss
declares what it ``needs`` besides the sampled tokens and their logprobs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from attrs import frozen

if TYPE_CHECKING:
    from torch import Tensor

    LossOutput = tuple[Tensor, dict[str, Tensor]]

_LOG_RATIO_LIMIT = 20.0
"""Largest log ratio: exp(20) is too large a weight to learn from, but it is finite."""

Need = Literal["reference", "entropy", "all_rows"]
"""A need that a loss can declare.

``"reference"``: ``reference_logprobs``; the trainer keeps the weights that the run started from.
``"entropy"``: ``entropy``, with a gradient.
``"all_rows"``: rows with advantage 0 as well, because another term of the loss trains on them.
"""

_Function = TypeVar("_Function", bound=Callable[..., Any])


@frozen
class Needs:
    """One declaration of ``needs``."""

    names: frozenset[Need]
    when: str | None
    """Name of the option that decides; None means always."""


def needs(*names: Need, when: str | None = None) -> Callable[[_Function], _Function]:
    """Declare what a loss needs; several declarations of one function add up.

        @needs("entropy")
        @needs("reference", "all_rows", when="kl_coefficient")
        def my_loss(inputs, *, kl_coefficient=0.0): ...

    Args:
        names: see ``Need``.
        when: name of an option; the loss needs this only if the option's value is neither 0 nor None nor
            empty.

    Raises:
        ValueError: a name is unknown, or the function has no option ``when``.
    """
    if unknown := set(names) - set(get_args(Need)):
        raise ValueError(f"needs: unknown {sorted(unknown)}; expected some of {get_args(Need)}")

    def declare(function: _Function) -> _Function:
        if when is not None and when not in signature(function).parameters:
            raise ValueError(f"needs: {function.__qualname__} has no option {when!r}")
        declared = (*_declared(function), Needs(frozenset(names), when))
        function.needs = declared  # type: ignore[attr-defined]
        return function

    return declare


def needs_of(function: Callable[..., Any], options: Mapping[str, Any]) -> frozenset[Need]:
    """Return what a loss needs with these options; the other options have their defaults."""
    declared = _declared(function)
    conditional = {each.when for each in declared if each.when is not None}
    defaults = {name: signature(function).parameters[name].default for name in conditional}
    values = {**defaults, **options}
    active = [each for each in declared if each.when is None or values[each.when]]
    return frozenset(name for each in active for name in each.names)


def _declared(function: Callable[..., Any]) -> tuple[Needs, ...]:
    declared: tuple[Needs, ...] = getattr(function, "needs", ())
    return declared


@frozen(kw_only=True, eq=False)
class LossInputs:
    """The sampled tokens of one micro-batch.

    Tensors are [N]; only ``policy_logprobs`` and ``entropy`` have a gradient.
    """

    policy_logprobs: Tensor
    """Logprobs by the weights that are being updated."""
    proximal_logprobs: Tensor
    """Logprobs by the trainer's weights before the step's first update (``trainer.proximal = "recompute"``),
    or by the engine (``"generation"``)."""
    generation_logprobs: Tensor
    """Logprobs by the engine when it sampled the token: the behaviour policy."""
    reference_logprobs: Tensor | None = None
    """Logprobs by the weights that the run started from; None unless the loss needs "reference"."""
    entropy: Tensor | None = None
    """Entropy of the policy's distribution that each token was sampled from, in nats, at the sampling
    temperature; None unless the loss needs "entropy"."""
    advantages: Tensor
    """Advantage of the token's rollout."""
    rows: Tensor
    """Index of the row that a token belongs to: an integer from 0, below the number of rows."""
    step: int
    """Version of the weights that the step trains."""
    update: int
    """Number of the update within its step, from 0."""
    update_tokens: int
    """Sampled tokens of the whole update, by which the core divides the sum of the losses."""
    update_rows: int
    """Rows of the whole update.  With L a row's number of tokens, losses times ``update_tokens`` /
    (``update_rows`` * L) are averaged over rows instead of tokens."""


@needs("reference", "all_rows", when="kl_coefficient")
def grpo(
    inputs: LossInputs,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    importance_cap: float = 2.0,
    dual_clip: float | None = None,
    kl_coefficient: float = 0.0,
) -> LossOutput:
    """Clipped policy gradient with a correction for tokens that older weights sampled.

    With r = policy / proximal, w = min(proximal / generation, ``importance_cap``) and advantage A, a
    token's loss is::

        - w min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    the decoupled objective (AReaL, arXiv 2505.24298 eq. 5) with a truncated importance weight (IMPALA, arXiv
    1802.01561).  The clip bounds how far a step moves from where it began, the weight corrects for who
    sampled.  Where proximal is generation, w is 1 and this is PPO's objective (arXiv 1707.06347 eq. 7); an
    asymmetric clip is DAPO's (arXiv 2503.14476).  ``dual_clip`` = c > 1 bounds the loss of a negative
    advantage by - c A (arXiv 1912.09729).  ``kl_coefficient`` adds an estimate of KL(policy, reference), see
    ``reference_kl``.

    Args:
        inputs: the sampled tokens of one micro-batch.
        clip_low: the ratio of a token with a negative advantage is clipped below 1 minus this.
        clip_high: the ratio of a token with a positive advantage is clipped above 1 plus this.
        importance_cap: largest importance weight of a token that older weights sampled.
        dual_clip: bounds the loss of a negative advantage by this times the advantage; more than 1.  None
            does not bound it.
        kl_coefficient: factor of the KL divergence to the reference model.  0 needs no reference model.

    Metrics: ``clip_fraction_low``, ``clip_fraction_high`` (tokens whose gradient the clip removes),
    ``importance_weight_mean``, ``importance_weight_max`` (after the cap), ``kl``.
    """
    advantages = inputs.advantages
    ratio = _exp(inputs.policy_logprobs - inputs.proximal_logprobs)
    objective = (ratio * advantages).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    if dual_clip is not None:
        objective = objective.maximum(dual_clip * advantages).where(advantages < 0, objective)
    weight = _exp(inputs.proximal_logprobs - inputs.generation_logprobs).clamp(max=importance_cap).detach()
    losses = -weight * objective
    metrics = {
        "clip_fraction_low": ((ratio < 1 - clip_low) & (advantages < 0)).to(ratio.dtype),
        "clip_fraction_high": ((ratio > 1 + clip_high) & (advantages > 0)).to(ratio.dtype),
        "importance_weight_mean": weight,
        "importance_weight_max": weight,
    }
    if kl_coefficient and inputs.reference_logprobs is not None:
        kl = reference_kl(inputs.policy_logprobs, inputs.reference_logprobs)
        losses = losses + kl_coefficient * kl
        metrics["kl"] = kl.detach()
    return losses, metrics


def reference_kl(policy_logprobs: Tensor, reference_logprobs: Tensor) -> Tensor:
    """KL(policy, reference) of each token: the estimate k3 = exp(d) - d - 1 with d = reference - policy.

    The gradient is that of the divergence, not of its estimate: the score term of the expectation is
    included, which makes it - d for a token that the policy sampled (arXiv 2506.09477).
    """
    d = (reference_logprobs - policy_logprobs).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    sampled = (policy_logprobs - policy_logprobs.detach()).exp()
    return sampled * (d.exp() - d - 1)


def _exp(log_ratio: Tensor) -> Tensor:
    return log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp()
