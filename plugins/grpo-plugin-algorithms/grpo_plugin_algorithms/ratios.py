"""Ratios of policy to proximal probabilities, for each token, and reductions over sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import frozen

from grpo_core.losses import bounded_exp

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


def sums(values: Tensor, sequences: Tensor) -> Tensor:
    """Return the sum over each token's sequence, [N]."""
    n = int(sequences.max()) + 1 if sequences.numel() else 0
    return values.new_zeros(n).index_add(0, sequences, values)[sequences]


def means(values: Tensor, sequences: Tensor) -> Tensor:
    """Return the mean over each token's sequence, [N]."""
    return sums(values, sequences) / sums(values.new_ones(values.shape), sequences)
