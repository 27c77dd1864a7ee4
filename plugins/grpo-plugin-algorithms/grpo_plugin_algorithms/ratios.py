"""Ratios of policy to proximal probabilities, for each token."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from grpo_core.losses import bounded_exp
from grpo_plugin_algorithms.tensors import means

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "sequence", "sequence_token"]


def policy_ratio(policy: Tensor, proximal: Tensor, sequences: Tensor, level: Level = "token") -> Tensor:
    """Compute r for each token, with a gradient through ``policy``.

    ::

        token            r = policy / proximal
        sequence         r = s = the geometric mean of policy / proximal over the sequence
                             (GSPO, arXiv 2507.18071 eq. 7)
        sequence_token   r = sg(s) policy / sg(policy): the value of the sequence, the gradient of the token
                             (GSPO-token, eq. 14; sg stops the gradient)

    Args:
        policy: logprobs [N].
        proximal: logprobs [N] without gradient.
        sequences: index [N] of each token's sequence; sequences must be whole.
        level: name of the ratio, as above.
    """
    log_ratio = policy - proximal
    if level == "token":
        return bounded_exp(log_ratio)
    sequence = means(log_ratio, sequences)
    if level == "sequence":
        return bounded_exp(sequence)
    return bounded_exp(sequence.detach()) * (policy - policy.detach()).exp()
