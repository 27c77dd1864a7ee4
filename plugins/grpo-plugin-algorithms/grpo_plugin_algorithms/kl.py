"""Estimators of the KL divergence to a reference model, for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from attrs import field, frozen

from grpo_core.losses import LARGEST_LOG_RATIO, bounded_exp
from grpo_plugin_algorithms.ranges import FACTOR, POSITIVE, check_idle

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_core import LossInputs

Estimator = Literal["k1", "k2", "k3"]


@frozen(kw_only=True)
class Kl:
    """The KL divergence to the reference model."""

    coefficient: float = field(default=0.0, validator=FACTOR)
    """Factor of the divergence; 0 needs no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """The estimate of the divergence; with d = reference - policy k1 = - d, k2 = d^2 / 2 or
    k3 = exp(d) - d - 1."""
    acts_on: Literal["loss", "reward"] = "loss"
    """Whether it is a term of the loss, or lowers the advantage of each token ("reward"), with proximal
    instead of policy logprobs."""
    weight: Literal["score", "none", "ratio", "generation"] = "score"
    """Weight of the estimate in the loss: "score" (the gradient is that of the divergence), "none" (that of
    the estimate), "ratio" (times the ratio of the objective) or "generation" (times policy / generation)."""
    input_clamp: float | None = field(default=None, validator=POSITIVE)
    """Difference of logprobs at which the estimate is clamped and loses its gradient."""
    output_clamp: float | None = field(default=None, validator=POSITIVE)
    """Value at which the weighted estimate is clamped."""

    def __attrs_post_init__(self) -> None:
        check_idle(
            self, "estimator", "acts_on", "weight", "input_clamp", "output_clamp", without="coefficient"
        )
        if self.acts_on == "reward" and self.weight != "score":
            raise ValueError("weight is of a term of the loss, and acts_on = 'reward' has none")

    @property
    def needs(self) -> tuple[str, ...]:
        return ("scores.reference", "all_rows") if self.coefficient else ()

    def of_reward(self, inputs: LossInputs, reference: Tensor) -> Tensor:
        """Return the estimate [N] of a penalty of the reward, without gradient."""
        return self._estimate(inputs.proximal_logprobs.detach(), reference)

    def of_loss(self, inputs: LossInputs, reference: Tensor, ratio: Tensor | None) -> Tensor:
        """Return the estimate [N] of a term of the loss, with its gradient."""
        policy = inputs.policy_logprobs
        weights = ratio if self.weight == "ratio" else None
        if self.weight == "score":
            weights = score_weights(policy)
        elif self.weight == "generation":
            weights = bounded_exp(policy - inputs.generation_logprobs)
        return self._estimate(policy, reference, weights)

    def _estimate(self, policy: Tensor, reference: Tensor, weights: Tensor | None = None) -> Tensor:
        return kl_estimate(
            policy,
            reference,
            self.estimator,
            input_clamp=self.input_clamp,
            output_clamp=self.output_clamp,
            weights=weights,
        )


def kl_estimate(
    policy: Tensor,
    reference: Tensor,
    estimator: Estimator = "k3",
    *,
    input_clamp: float | None = None,
    output_clamp: float | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Estimate KL(policy, reference) in nats at each token that the policy sampled.

    With d = reference - policy (http://joschu.net/blog/kl-approx.html)::

        k1 = - d        k2 = d^2 / 2        k3 = exp(d) - d - 1

    Args:
        policy: logprobs [N].
        reference: logprobs [N] without gradient.
        estimator: name of the estimator, as above.
        input_clamp: bound of |d|; a clamped token has no gradient, neither through d nor through its weight.
            Without it, d is at most 20.
        output_clamp: bound of the weighted estimate's absolute value.
        weights: factor [N] of the estimate before its clamp, such as ``score_weights``.
    """
    difference = reference - policy
    limit = LARGEST_LOG_RATIO if input_clamp is None else input_clamp
    d = difference.clamp(-limit, limit)
    if weights is not None and input_clamp is not None:
        weights = weights.where(d == difference, weights.detach())
    if estimator == "k1":
        estimate = -d
    elif estimator == "k2":
        estimate = d.square() / 2
    else:
        estimate = d.exp() - d - 1
    if weights is not None:
        estimate = weights * estimate
    return estimate if output_clamp is None else estimate.clamp(-output_clamp, output_clamp)


def score_weights(policy: Tensor) -> Tensor:
    """Return weights of value 1 with the gradient of the logprobs: the straight-through correction.

    With these weights the gradient of an estimate is the gradient of the divergence, because the score term
    of the expectation is included (arXiv 2506.09477).
    """
    return (policy - policy.detach()).exp()
