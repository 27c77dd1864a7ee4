"""Ratios of policy to proximal probabilities, for each token, with a gradient through the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from grpo_core.losses import bounded_exp
from grpo_plugin_algorithms.tensors import means

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_core import LossInputs


@frozen
class Token:
    """r = policy / proximal."""

    def of(self, inputs: LossInputs) -> Tensor:
        """Compute r [N]."""
        return bounded_exp(inputs.policy_logprobs - inputs.proximal_logprobs)


@frozen
class Sequence:
    """r = s = the geometric mean of policy / proximal over the sequence (GSPO, arXiv 2507.18071 eq. 7)."""

    needs = ("sequences",)

    def of(self, inputs: LossInputs) -> Tensor:
        """Compute r [N]."""
        return bounded_exp(means(inputs.policy_logprobs - inputs.proximal_logprobs, inputs.sequences))


@frozen
class SequenceToken(Sequence):
    """r = sg(s) policy / sg(policy): the value of the sequence, the gradient of the token.

    (GSPO-token, arXiv 2507.18071 eq. 14; sg stops the gradient.)
    """

    def of(self, inputs: LossInputs) -> Tensor:
        """Compute r [N]."""
        policy = inputs.policy_logprobs
        return super().of(inputs).detach() * (policy - policy.detach()).exp()
