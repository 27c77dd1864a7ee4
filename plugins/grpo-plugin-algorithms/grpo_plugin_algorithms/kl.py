"""Estimators of the KL divergence to a reference model, for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from grpo_core.losses import LARGEST_LOG_RATIO

if TYPE_CHECKING:
    from torch import Tensor

Estimator = Literal["k1", "k2", "k3"]


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
