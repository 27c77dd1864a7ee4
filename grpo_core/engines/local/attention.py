"""Parts of attention of the fast path."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def attend(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None) -> Tensor:
    """Attend from the newest token of each row: heads that share a key become queries of that key.

    Args: q [R, KV, G, D]; keys, values [R, KV, S, D]; mask [R, 1, 1, S] is added.  Returns [R, KV, G, D].
    """
    if q.shape[2] == 1 or q.dtype != torch.float32 or q.device.type != "cpu":
        return F.scaled_dot_product_attention(q, keys, values, mask)
    # torch's kernel for a CPU takes 20 times as long for 3 float32 queries, on an AMD processor
    queries = q.flatten(0, 1).transpose(1, 2) * q.shape[-1] ** -0.5
    scores = torch.bmm(keys.flatten(0, 1), queries)
    if mask is not None:
        scores.view(*keys.shape[:3], -1).add_(mask.transpose(2, 3))
    return torch.bmm(scores.softmax(1).transpose(1, 2), values.flatten(0, 1)).view_as(q)


def norm_heads_(x: Tensor, weight: Tensor, eps: float) -> None:
    """Apply the RMS norm over D to [N, H, D], in place."""
    scale = x.float().square().mean(-1, keepdim=True).add_(eps).rsqrt_().to(x.dtype)
    x.mul_(scale).mul_(weight)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate features j and j + D / 2 of x [N, H, D] by one angle; cos and sin are [N or 1, 1, D]."""
    half = x.shape[-1] // 2
    out = x * cos
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=-1)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:])
    return out


def prompt_mask(longest: int, lengths: Tensor) -> Tensor:
    """Return a mask [P, 1, T, T]: True where a token may attend, neither ahead nor to left padding."""
    at = torch.arange(longest, device=lengths.device)
    seen = (at <= at[:, None]) & (at >= longest - lengths[:, None, None])
    # a padding token attends to itself, because a softmax over nothing is NaN
    return (seen | torch.eye(longest, dtype=torch.bool, device=lengths.device))[:, None]
