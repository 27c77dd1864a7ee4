"""Flash attention on a CPU: torch's own operations, with what their kernels for GPUs demand and compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from grpo_core.training import packing

needs_grouped_heads = pytest.mark.skipif(
    not packing._has_varlen(), reason="torch's flash attention of packed rows has grouped heads from 2.12 on"
)


@contextmanager
def on_a_cpu() -> Iterator[list[str]]:
    """Give torch's flash attention a kernel for CPUs; yields the calls of it."""
    calls: list[str] = []

    def forward(
        query: Tensor, key: Tensor, value: Tensor, ends: Tensor, key_ends: Tensor,
        most: int, most_keys: int, dropout: float, causal: bool, debug: bool, *,
        scale: float | None = None, window_size_left: int, window_size_right: int, **others: Any,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        calls.append("forward")
        assert (dropout, debug, set(others.values()) - {None}) == (0.0, False, set())
        assert causal == ((window_size_left, window_size_right) == (-1, 0))
        _check(query, key, value, ends, key_ends, most, most_keys)
        parts = zip(*_parts(query, key, value, ends, key_ends), strict=True)
        found, sums = zip(*(_attention(*part, scale, window_size_left) for part in parts), strict=True)
        out, nothing = torch.cat(found).to(query.dtype), torch.empty(0)
        return out, torch.cat(sums, dim=1), torch.zeros(2, dtype=torch.uint64), nothing, nothing

    def backward(
        gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, sums: Tensor,
        ends: Tensor, key_ends: Tensor, most: int, most_keys: int, dropout: float, causal: bool,
        state: Tensor, unused: Tensor, *,
        scale: float | None = None, window_size_left: int, window_size_right: int,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        calls.append("backward")
        assert gradient.stride(-1) == out.stride(-1) == 1
        _check(query, key, value, ends, key_ends, most, most_keys)
        found = [
            _gradients(*part, scale, window_size_left)
            for part in zip(
                *_parts(query, key, value, ends, key_ends), gradient.split(_counts(ends)), strict=True
            )
        ]
        return tuple(torch.cat(parts).to(query.dtype) for parts in zip(*found, strict=True))

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield calls


def _check(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor, keys: Tensor, most: int, many: int
) -> None:
    """Demand what the kernels for GPUs demand."""
    assert query.dtype == key.dtype == value.dtype
    assert query.dtype in (torch.bfloat16, torch.float16)
    assert query.shape[-1] % 8 == 0
    assert query.shape[-1] <= 256
    assert key.shape == value.shape == (keys[-1], key.shape[1], query.shape[2])
    assert query.shape[0] == ends[-1]
    assert query.stride(-1) == key.stride(-1) == value.stride(-1) == 1
    for each, largest in ((ends, most), (keys, many)):
        assert each.dtype == torch.int32
        assert each.is_contiguous()
        assert each.diff().max() == largest


def _counts(ends: Tensor) -> list[int]:
    counts: list[int] = ends.diff().tolist()
    return counts


def _parts(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, keys: Tensor) -> list[Any]:
    return [query.split(_counts(ends)), key.split(_counts(keys)), value.split(_counts(keys))]


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None, left: int) -> tuple[Tensor, ...]:
    """Return the attention of a part, and the logarithms of its sums; the last queries have the last keys."""
    scores = _scores(q, k, scale, left)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), _wide(v, q)), scores.logsumexp(-1)


def _gradients(
    q: Tensor, k: Tensor, v: Tensor, gradient: Tensor, scale: float | None, left: int
) -> tuple[Tensor, ...]:
    """Return the gradients of queries, keys and values of a part."""
    shares, gradient = _scores(q, k, scale, left).softmax(-1), gradient.float()
    of_shares = torch.einsum("qhd,khd->hqk", gradient, _wide(v, q))
    of_scores = shares * (of_shares - (shares * of_shares).sum(-1, keepdim=True)) * _scale(q, scale)
    of_keys = torch.einsum("hqk,qhd->khd", of_scores, q.float())
    of_values = torch.einsum("hqk,qhd->khd", shares, gradient)
    grouped = [each.unflatten(1, (k.shape[1], -1)).sum(2) for each in (of_keys, of_values)]
    return torch.einsum("hqk,khd->qhd", of_scores, _wide(k, q)), *grouped


def _scores(q: Tensor, k: Tensor, scale: float | None, left: int) -> Tensor:
    behind = torch.arange(len(q))[:, None] + len(k) - len(q) - torch.arange(len(k))
    hidden = (behind < 0) | (behind > (left if left >= 0 else len(k)))
    scores = torch.einsum("qhd,khd->hqk", q.float(), _wide(k, q)) * _scale(q, scale)
    return scores.masked_fill(hidden, -torch.inf)


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _wide(tensor: Tensor, q: Tensor) -> Tensor:
    """Return keys or values for each head of the queries."""
    return tensor.repeat_interleave(q.shape[1] // tensor.shape[1], 1).float()
