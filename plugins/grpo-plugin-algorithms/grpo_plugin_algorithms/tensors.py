"""Reductions over sequences of tensors with one number for each token; torch is not imported."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sums(values: Tensor, sequences: Tensor) -> Tensor:
    """Return the sum over each token's sequence, [N]."""
    n = int(sequences.max()) + 1 if sequences.numel() else 0
    return values.new_zeros(n).index_add(0, sequences, values)[sequences]


def means(values: Tensor, sequences: Tensor) -> Tensor:
    """Return the mean over each token's sequence, [N]."""
    return sums(values, sequences) / sums(values.new_ones(values.shape), sequences)
