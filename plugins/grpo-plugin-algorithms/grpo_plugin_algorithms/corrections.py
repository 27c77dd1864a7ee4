"""Importance weights and masks for tokens sampled by older weights or by an engine with other numerics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attrs import field, frozen

from grpo_core.losses import bounded_exp
from grpo_plugin_algorithms.ranges import CAP, FACTOR
from grpo_plugin_algorithms.ratios import means, sums

if TYPE_CHECKING:
    from torch import Tensor


@frozen(kw_only=True)
class Off:
    """w = 1."""

    def weights(self, log_ratio: Tensor, sequences: Tensor) -> Tensor:
        """Compute the weight w of each token, without gradient.

        With r = proximal / generation of a token, and R the product of r over its sequence, of L tokens, the
        docstrings of the classes have the formulas of w.

        Args:
            log_ratio: log r [N], without gradient.
            sequences: index [N] of each token's sequence.
        """
        return log_ratio.new_ones(log_ratio.shape)


@frozen(kw_only=True)
class _Bounded:
    floor: float = field(default=0.0, validator=FACTOR)
    """Lower bound of the importance weight."""
    cap: float = field(default=2.0, validator=CAP)
    """Upper bound of the importance weight."""

    def __attrs_post_init__(self) -> None:
        if self.floor > self.cap:
            raise ValueError(f"floor = {self.floor} is above cap = {self.cap}")

    def _inside(self, ratio: Tensor) -> Tensor:
        return (ratio >= self.floor) & (ratio <= self.cap)


class _OfSequences(_Bounded):
    needs = ("sequences",)


class TokenTruncate(_Bounded):
    """w = clip(r, floor, cap): truncated importance sampling (TIS; IMPALA, arXiv 1802.01561)."""

    def weights(self, log_ratio: Tensor, sequences: Tensor) -> Tensor:
        ratio = bounded_exp(log_ratio)
        return ratio.clamp(self.floor, self.cap) if self.floor > 0 else ratio.clamp(max=self.cap)


class TokenMask(_Bounded):
    """w = r if floor <= r <= cap else 0: IcePop."""

    def weights(self, log_ratio: Tensor, sequences: Tensor) -> Tensor:
        ratio = bounded_exp(log_ratio)
        return ratio.where(self._inside(ratio), 0.0)


class SequenceTruncate(_OfSequences):
    """w = clip(R, floor, cap): truncated importance sampling of sequences."""

    def weights(self, log_ratio: Tensor, sequences: Tensor) -> Tensor:
        return bounded_exp(sums(log_ratio, sequences)).clamp(self.floor, self.cap)


class SequenceMask(_OfSequences):
    """w = R if floor <= R <= cap else 0: masked importance sampling of sequences."""

    def weights(self, log_ratio: Tensor, sequences: Tensor) -> Tensor:
        product = bounded_exp(sums(log_ratio, sequences))
        return product.where(self._inside(product), 0.0)


class GeometricMask(_OfSequences):
    """w = r if floor <= R^(1 / L) <= cap else 0."""

    def weights(self, log_ratio: Tensor, sequences: Tensor) -> Tensor:
        mean = bounded_exp(means(log_ratio, sequences))
        return bounded_exp(log_ratio).where(self._inside(mean), 0.0)


Correction = Off | TokenTruncate | TokenMask | SequenceTruncate | SequenceMask | GeometricMask
