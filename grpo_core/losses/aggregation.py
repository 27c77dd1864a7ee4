"""Aggregation: the weights of an update's token losses in their sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_core.contracts.loss import LossInputs

Aggregation = Literal["token", "sequence", "prompt", "constant"]


def row_weights(
    tokens: Sequence[int],
    *,
    sequences: Sequence[int],
    prompts: Sequence[int],
    aggregation: Aggregation = "token",
    constant: float | None = None,
) -> list[float]:
    """Compute for each row of an update the weight of each of its sampled tokens.

    With N sampled tokens, S sequences (rollouts) and P prompts in the whole update, and L the sampled tokens
    of the row's sequence or prompt, the weight is::

        token       1 / N          the mean over tokens (DAPO, arXiv 2503.14476 section 3.3)
        sequence    1 / (S L)      the mean over sequences of their means (GRPO, arXiv 2402.03300 eq. 3)
        prompt      1 / (P L)      the mean over prompts of their means over tokens
        constant    1 / (S C)      the sum, by a constant C (Dr. GRPO, arXiv 2503.20783 section 3.2)

    The weights of an update with sampled tokens add up to 1, except with a constant.

    Args:
        tokens: sampled tokens of each row.
        sequences: a number for each row that is equal for the rows of one rollout.
        prompts: a number for each row that is equal for the rollouts of one prompt.
        aggregation: as above.
        constant: C, such as the largest number of tokens of a completion; needed with "constant" only.
    """
    if aggregation == "token":
        return [1 / max(1, sum(tokens))] * len(tokens)
    n = max(1, len(set(sequences)))
    if aggregation == "constant":
        if not constant:
            raise ValueError("aggregation 'constant' needs a constant above 0")
        return [1 / (n * constant)] * len(tokens)
    owners = sequences if aggregation == "sequence" else prompts
    lengths: Counter[int] = Counter()
    for owner, length in zip(owners, tokens, strict=True):
        lengths[owner] += length
    return [1 / (len(lengths) * max(1, lengths[owner])) for owner in owners]


def total(losses: Tensor, inputs: LossInputs) -> Tensor:
    """Sum the losses [N] of tokens by their weights, as the core does; micro-batches add up."""
    return (losses * inputs.weights).sum()
