"""From logits to tokens: counter-based uniforms and inverse-CDF sampling, vectorised over rows.

A token depends only on its row's logits, seed and position, not on the other rows of the batch.  Uniforms
come from splitmix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014) evaluated at a
counter; a token is where the cumulative distribution crosses its uniform.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_GAMMA = 0x9E3779B97F4A7C15
_FLAT = 1024
"""Vocabularies up to this size need no second level."""
_BLOCK = 128
"""Tokens in a block of the second level."""


def _signed(value: int) -> int:
    """Return the int64 with the bits of ``value`` modulo 2**64."""
    value %= 2**64
    return value - 2**64 if value >= 2**63 else value


def _mix_(z: Tensor) -> Tensor:
    """Apply splitmix64's finalizer to int64 [...], in place."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        # a right shift of an int64 repeats the sign bit: the mask makes it the unsigned shift
        z.bitwise_xor_((z >> shift).bitwise_and_(2 ** (64 - shift) - 1))
        if factor != 1:
            z.mul_(_signed(factor))
    return z


def counters(seeds: Sequence[int]) -> Tensor:
    """Return the initial counters of these seeds, int64 [len(seeds)].  Any int is a seed, modulo 2**64."""
    return _mix_(torch.tensor([_signed(seed + _GAMMA) for seed in seeds], dtype=torch.int64))


def next_uniforms(counters: Tensor) -> Tensor:
    """Return the next uniform of each stream, float64 [R] in [0, 1); advance the counters in place."""
    counters.add_(_signed(_GAMMA))
    bits = _mix_(counters.clone())
    return (bits >> 11).bitwise_and_(2**53 - 1).to(torch.float64).mul_(2.0**-53)


def sample(
    logits: Tensor,
    uniforms: Tensor,
    inverse_temperatures: Tensor | None = None,
    cuts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sample one token of each row.

    Args:
        logits: [R, V] float32; overwritten.
        uniforms: [R] float64 in [0, 1).
        inverse_temperatures: [R]; None: all 1.
        cuts: [R, 3], see ``cut_``; None: no row is cut.

    Returns:
        tokens [R] int64, and their logprobs [R] float32 under the sampling distribution (NaN if a row's
        logits are not a distribution).  A token of probability 0 is never returned.
    """
    if inverse_temperatures is not None:
        logits.mul_(inverse_temperatures[:, None])
    if cuts is not None:
        rows = cuts.any(1).nonzero()[:, 0]
        logits[rows] = truncate_(logits[rows], cuts[rows])
    probabilities = torch.softmax(logits, -1, out=logits)
    if logits.shape[1] <= _FLAT:
        tokens = _cross(probabilities.cumsum(-1), uniforms)[0]
    else:
        tokens = _sample_two_level(probabilities, uniforms)
    return tokens, probabilities.gather(1, tokens[:, None])[:, 0].log_()


def truncation(*, top_k: int, top_p: float, min_p: float) -> tuple[float, float, float]:
    """Return a row of ``cuts``; all 0 is the whole distribution."""
    return float(top_k), 1.0 - top_p, min_p


def truncate_(scores: Tensor, cuts: Tensor) -> Tensor:
    """Set the scores of tokens that must not be sampled to -inf, in place; return ``scores``.

    Like transformers' warpers, in the order top_k, top_p, min_p, each on the tokens that remain.

    Args:
        scores: logits [R, V] at the sampling temperature.
        cuts: [R, 3] float64: top_k (0: all), 1 - top_p, and min_p, of each row.
    """
    vocabulary = scores.shape[1]
    top_k = cuts[:, 0].to(torch.int64)
    rest, min_p = cuts[:, 1:2].to(scores.dtype), cuts[:, 2:].to(scores.dtype)
    ascending, order = scores.sort(-1)
    kept = torch.where(top_k > 0, top_k, vocabulary).clamp_(max=vocabulary)
    smallest = ascending.gather(1, (vocabulary - kept)[:, None])
    ascending.masked_fill_(ascending < smallest, -torch.inf)
    unlikely = (ascending.softmax(-1).cumsum_(-1) <= rest).logical_and_(rest > 0)
    unlikely[:, -1] = False
    ascending.masked_fill_(unlikely, -torch.inf)
    scores.scatter_(1, order, ascending)
    probabilities = scores.softmax(-1)
    return scores.masked_fill_(probabilities < min_p * probabilities.amax(-1, keepdim=True), -torch.inf)


def greedy(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the most likely token of each row of ``logits`` [R, V], and its logprob at temperature 1."""
    tokens = logits.argmax(-1)
    logprobs = logits.gather(1, tokens[:, None])[:, 0] - logits.logsumexp(-1)
    return tokens, logprobs


def _cross(cumulative: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index [R] at which ``cumulative`` [R, N] exceeds ``uniforms`` [R] of its total.

    The threshold is below the last value, so such an index exists.  A running sum of non-negative terms never
    falls, so it rises at this index: the term is not 0.  (Rows of NaN give 0.)
    """
    total = cumulative[:, -1]
    below_total = torch.nextafter(total, torch.zeros_like(total))
    threshold = torch.minimum((uniforms * total).to(cumulative.dtype), below_total)
    index = torch.searchsorted(cumulative, threshold[:, None], right=True)[:, 0]
    return index.remainder_(cumulative.shape[1]), threshold


def _sample_two_level(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Choose a block of ``_BLOCK`` tokens, then a token in it, so that a long row is summed, not scanned."""
    rows, vocabulary = probabilities.shape
    whole = vocabulary // _BLOCK
    sums = probabilities[:, : whole * _BLOCK].view(rows, whole, _BLOCK).sum(-1)
    if whole * _BLOCK < vocabulary:
        sums = torch.cat([sums, probabilities[:, whole * _BLOCK :].sum(-1, keepdim=True)], 1)
    sums = sums.to(torch.float64)
    cumulative = sums.cumsum(-1)
    block, threshold = _cross(cumulative, uniforms)
    at = block[:, None]
    size = sums.gather(1, at)[:, 0]
    share = (threshold - cumulative.gather(1, at)[:, 0] + size).div_(size).clamp_(0, 1)

    tokens = at * _BLOCK + torch.arange(_BLOCK, device=probabilities.device)
    inside = probabilities.gather(1, tokens.clamp(max=vocabulary - 1)).to(torch.float64)
    inside.masked_fill_(tokens >= vocabulary, 0)
    return _cross(inside.cumsum(-1), share)[0] + block * _BLOCK
