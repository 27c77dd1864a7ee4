"""Attention of the fast path, on tensors whose last dimension is the row or the token of a prompt."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_TILE = 1 << 18
"""Elements of a product held at once: about the size of a core's cache."""


def attend_columns(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attend from one query of each row, with the rows innermost, in tiles of columns.

    Args: q [KV, G, D, R]; keys, values [S, KV, D, R]; mask [S, 1, 1, R].  Returns [KV, G, D, R].
    """
    kv, g, d, r = q.shape
    s = len(keys)
    tile = min(s, max(1, _TILE // (kv * g * d * r)))
    product = torch.empty(tile, kv, g, d, r)
    scores = torch.empty(s, kv, g, r)
    for a in range(0, s, tile):
        b = min(a + tile, s)
        torch.mul(keys[a:b].unsqueeze(2), q, out=product[: b - a])
        torch.sum(product[: b - a], 3, out=scores[a:b])
    if mask is not None:
        scores += mask
    weights = torch.softmax(scores, 0).unsqueeze(3)
    out = torch.zeros(kv, g, d, r) if s > tile else torch.empty(0)
    for a in range(0, s, tile):
        b = min(a + tile, s)
        torch.mul(values[a:b].unsqueeze(2), weights[a:b], out=product[: b - a])
        part = product[: b - a].sum(0)
        out = out.add_(part) if s > tile else part
    return out


def attend_rows_first(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Like ``attend_columns``, with torch's fused kernels, for keys and values laid out as [R, KV, S, D]."""
    out = F.scaled_dot_product_attention(
        q.permute(3, 0, 1, 2),  # the G heads of a KV head become G queries, so keys are not repeated
        keys.permute(3, 1, 0, 2),
        values.permute(3, 1, 0, 2),
        attn_mask=None if mask is None else mask.permute(3, 1, 2, 0),
        scale=1.0,
    )
    return out.permute(1, 2, 3, 0)


def fan_out(x: Tensor, of: Tensor) -> Tensor:
    """Select the columns ``of``: x [..., P] -> [..., len(of)]."""
    prompts = x.shape[-1]
    copies = len(of) // prompts
    if torch.equal(of, torch.arange(prompts, device=of.device).repeat_interleave(copies)):
        return x.unsqueeze(-1).expand(*x.shape, copies).flatten(-2)  # whole groups need no gather
    return x.flatten(0, -2).t().index_select(0, of).t().reshape(*x.shape[:-1], len(of))


def norm_heads_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Apply the RMS norm over D to [H, D, N], in place."""
    scale = x.float().square().mean(1, keepdim=True).add_(eps).rsqrt_().to(x.dtype)
    x.mul_(scale).mul_(weight[:, None])


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate features j and j + D / 2 of x [H, D, N] by one angle; cos and sin are [D, N or 1]."""
    half = x.shape[1] // 2
    out = x * cos
    out[:, :half].addcmul_(x[:, half:], sin[:half], value=-1)
    out[:, half:].addcmul_(x[:, :half], sin[half:])
    return out


def prompt_mask(longest: int, lengths: Tensor) -> Tensor:
    """Return a mask [P, 1, T, T]: True where a token may attend, neither ahead nor to left padding."""
    at = torch.arange(longest, device=lengths.device)
    seen = (at <= at[:, None]) & (at >= longest - lengths[:, None, None])
    # a padding token attends to itself, because a softmax over nothing is NaN
    return (seen | torch.eye(longest, dtype=torch.bool, device=lengths.device))[:, None]
