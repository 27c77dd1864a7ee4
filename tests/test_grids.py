"""Attention in grids gives each part what it gets alone, and copies of a token add up their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grpo_core.training import grids
from grpo_core.training.grids import Grids

CPU = torch.device("cpu")


def alone(lengths: list[int], before: list[int], tensors: list[Tensor], window: int | None) -> Tensor:
    """The attention [1, T, H, D] of each part by itself, from queries, keys and values [1, H, T, D]."""
    queries, keys, values = (torch.split(each, lengths, dim=2) for each in tensors)
    found = []
    for q, k, v, place in zip(queries, keys, values, before, strict=True):
        if place >= 0:
            k, v = torch.cat([keys[place], k], dim=2), torch.cat([values[place], v], dim=2)
        n, m = q.shape[2], k.shape[2]
        behind = torch.arange(m - n, m)[:, None] - torch.arange(m)
        seen = (behind >= 0) & (behind < (window or m))
        found.append(scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3, enable_gqa=True))
    return torch.cat(found, dim=2).transpose(1, 2)


def with_gradients(function: Any, tensors: list[Tensor], upstream: Tensor) -> list[Tensor]:
    here = [each.clone().requires_grad_() for each in tensors]
    out = function(here)
    out.backward(upstream)
    return [out, *(each.grad for each in here)]


@st.composite
def parts(draw: Any) -> tuple[list[int], list[int]]:
    """Separate rows, and prompts with what follows them, of one token or many."""
    lengths: list[int] = []
    before: list[int] = []
    for members in draw(st.lists(st.integers(0, 4), min_size=1, max_size=6)):
        prompt = len(lengths)
        lengths += [draw(st.integers(1, 12)) for _ in range(1 + members)]
        before += [-1, *[prompt] * members]
    return lengths, before


@pytest.mark.parametrize("fused", [True, False])
@given(parts(), st.sampled_from([None, 1, 3, 20]), st.sampled_from([0, 16, 10_000]), st.integers(0, 9))
def test_each_part_gets_what_it_gets_alone(
    fused: bool, made: Any, window: int | None, call: int, seed: int
) -> None:
    lengths, before = made
    torch.manual_seed(seed)
    torch.backends.cuda.enable_flash_sdp(fused)
    total = sum(lengths)
    tensors = [torch.randn(1, heads, total, 4, dtype=torch.float64) for heads in (4, 2, 2)]
    upstream = torch.randn(1, total, 4, 4, dtype=torch.float64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grids, "CALL", call)  # from a grid for each length to one for all
        of_grids = Grids(lengths, before, CPU)
    expected = with_gradients(lambda given: alone(lengths, before, given, window), tensors, upstream)
    found = with_gradients(lambda given: of_grids.attention(*given, 0.3, window), tensors, upstream)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


def test_a_token_that_only_fills_a_grid_gives_no_gradient_and_no_nan() -> None:
    """A window of two hides all keys from what fills the second row, whose part is short and far behind."""
    lengths, before = [100, 1, 2, 99], [-1, 0, -1, 2]
    tensors = [torch.randn(1, 1, sum(lengths), 4) for _ in range(3)]
    upstream = torch.ones(1, sum(lengths), 1, 4)
    of_grids = Grids(lengths, before, CPU)
    assert len(of_grids.grids) == 2
    found = with_gradients(lambda given: of_grids.attention(*given, 0.3, 2), tensors, upstream)
    assert all(torch.isfinite(each).all() for each in found)


def test_parts_of_very_different_lengths_have_separate_grids() -> None:
    lengths = [2000, 1990, 20, 22, 21]
    assert [(len(g.before), g.queries) for g in Grids(lengths, [-1] * 5, CPU).grids] == [(2, 2000), (3, 22)]


def test_all_layers_have_the_same_mask() -> None:
    of_grids = Grids([3, 1, 2], [-1, 0, 0], CPU)
    query = torch.randn(1, 2, 6, 4)
    of_grids.attention(query, query, query, None, None)
    (masks,) = [grid._masks for grid in of_grids.grids if grid.before.any()]
    (first,) = masks.values()
    of_grids.attention(query, query, query, None, None)
    assert [each is first for each in masks.values()] == [True]
