"""Attention over packed parts in a few calls: parts of about equal size are padded to a grid.

For short parts, a call for each costs more than its products.  Only attention is padded: everything else in a
layer is computed without padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import define, field
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from grpo_core.training.batching import microbatches

CALL = 256
"""Cost of another grid, in tokens of padding; no value from 32 to 512 was clearly faster."""

Indices = NDArray[np.int64]


@define(eq=False)
class Grid:
    """B rows, or parts of rows, side by side, with up to n queries and m keys."""

    before: NDArray[np.int64]
    """Number of keys [B] before the first query of each."""
    queries: int
    keys: int
    _masks: dict[tuple[int | None, int], Tensor] = field(factory=dict)

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Compute the causal attention of queries [B, H, n, D] to keys and values [B, h, m, D].

        Padding queries and keys come after all others, which do not see them.
        """
        window = None if window is None or window >= self.keys else window
        fused = torch.backends.cuda.flash_sdp_enabled()  # type: ignore[no-untyped-call]
        shared = 1 if fused or query.is_cuda else query.shape[1] // key.shape[1]
        mask = self._mask(window, query, shared) if window or self.before.any() or shared > 1 else None
        # the heads that share a key are queries of it where torch would copy it for each of them
        return scaled_dot_product_attention(
            query.reshape(query.shape[0], query.shape[1] // shared, -1, query.shape[3]),
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=query.shape[1] // shared != key.shape[1],
        ).reshape(*query.shape[:3], value.shape[3])

    def _mask(self, window: int | None, like: Tensor, times: int) -> Tensor:
        """Return the additive mask of the scores, [n, m] or [B, 1, n, m], which all layers share.

        ``times``: of the queries, one after the other.
        """
        if (window, times) not in self._masks:
            same = (self.before == self.before[0]).all()
            before = torch.tensor(self.before[: 1 if same else None], dtype=torch.int32)[:, None, None, None]
            column = torch.arange(max(self.queries, self.keys), dtype=torch.int32)
            positions = (before + column[: self.queries, None]).clamp(max=self.keys - 1)  # each sees a key
            behind = positions - column[: self.keys]
            hidden = ((behind < 0) | (behind >= (window or self.keys))).repeat(1, 1, times, 1)
            mask = torch.zeros(hidden.shape, dtype=like.dtype).masked_fill_(hidden, float("-inf"))
            self._masks[window, times] = (mask[0, 0] if same else mask).to(like.device)
        return self._masks[window, times]


class Grids:
    """The grids of some parts.

    Args:
        lengths: tokens [P] of each part; they stand one after the other.
        before: place of the part before each of them in its row; -1 without one.
        device: of the tensors.
    """

    def __init__(self, lengths: Sequence[int], before: Sequence[int], device: torch.device) -> None:
        n, prompt = np.asarray(lengths), np.asarray(before)
        begin = n.cumsum() - n
        ahead = np.where(prompt < 0, 0, n[prompt])
        self.grids: list[Grid] = []
        queries: list[Indices] = []
        keys: list[Indices] = []
        own: list[NDArray[np.bool_]] = []
        for part in _divided(ahead + n, prompt >= 0):
            grid = Grid(before=ahead[part], queries=int(n[part].max()), keys=int((ahead + n)[part].max()))
            start, last, before_it = (each[part][:, None] for each in (begin, n - 1, ahead))
            column = np.arange(grid.queries)
            queries.append(start + np.minimum(column, last))
            own.append(column <= last)
            column = np.arange(grid.keys)
            mine = start + np.minimum(column - before_it, last)
            keys.append(np.where(column < before_it, begin[prompt[part]][:, None] + column, mine))
            self.grids.append(grid)
        self._shapes = [each.shape for each in queries], [each.shape for each in keys]
        indices = np.concatenate(queries, axis=None)
        back = np.empty(int(n.sum()), dtype=np.int64)
        used = np.flatnonzero(np.concatenate(own, axis=None))
        back[indices[used]] = used
        self.queries, self.keys, self.outputs = (
            torch.from_numpy(each).to(device) for each in (indices, np.concatenate(keys, axis=None), back)
        )

    def attention(
        self, query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None
    ) -> Tensor:
        """Compute the attention of queries [1, H, T, D] and return it as [1, T, H, D]."""
        heads, size = query.shape[1], value.shape[-1]
        q = self._side_by_side(query, self.queries, self._shapes[0])
        k, v = (self._side_by_side(each, self.keys, self._shapes[1]) for each in (key, value))
        computed = [
            grid.attention(*of_grid, scaling, window).transpose(1, 2).reshape(-1, heads * size)
            for grid, of_grid in zip(self.grids, zip(q, k, v, strict=True), strict=True)
        ]
        together = torch.cat(computed) if len(computed) > 1 else computed[0]
        return together.index_select(0, self.outputs).view(1, -1, heads, size)

    @staticmethod
    def _side_by_side(of_tokens: Tensor, indices: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
        """Return tensors [B, H, n, D], one for each grid, of [1, H, T, D]."""
        _, heads, total, size = of_tokens.shape
        rows = of_tokens[0].transpose(0, 1).reshape(total, heads * size).index_select(0, indices)
        split = torch.split(rows, [b * n for b, n in shapes])
        return [
            each.view(b, n, heads, size).transpose(1, 2) for each, (b, n) in zip(split, shapes, strict=True)
        ]


def _divided(keys: Indices, shared: NDArray[np.bool_]) -> list[Indices]:
    """Divide parts into grids with about equally many keys, where all follow a prompt or none do."""
    made = []
    for members in (np.flatnonzero(~shared), np.flatnonzero(shared)):
        if members.size:
            of_members = [int(length) for length in keys[members]]
            everything = len(of_members) * max(of_members)
            made += [members[each] for each in microbatches(of_members, everything, overhead=CALL)]
    return made
