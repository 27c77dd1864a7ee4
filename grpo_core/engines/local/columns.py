"""Growing tensors of a batch whose rows advance together: [column, ..., row].

Each decoding step fills one column for every row.  Columns are appended on the right and evicted on the left;
rows are appended at the end and removed by moving others into their places.  *Time* counts columns since the
beginning and does not change when the content moves to other columns.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

KEPT_BYTES = 64 << 20
"""Bytes that stay allocated when no row is left, since fresh memory is slow to touch."""


class Columns:
    """A set of tensors; columns ``start`` to ``end`` of the first ``rows`` rows are in use.

    Args:
        middle: the dimensions between column and row, and the dtype, of each tensor.
        rows_first: lay the memory out as [row, middle[0], column, middle[1]] instead of as indexed.
    """

    def __init__(
        self,
        middle: Sequence[tuple[tuple[int, ...], torch.dtype]],
        device: torch.device,
        *,
        rows_first: bool = False,
    ) -> None:
        self._middle = [shape for shape, _ in middle]
        self._rows_first = rows_first
        self._memory = [torch.empty(0, dtype=dtype, device=device) for _, dtype in middle]
        self._capacity = (0, 0)
        self.tensors: list[Tensor] = [self._lay_out(i, 0, 0) for i in range(len(middle))]
        self.start = self.end = self.rows = 0
        self.offset = 0
        """The time of column 0."""

    @property
    def time(self) -> int:
        """The time of the next column."""
        return self.end + self.offset

    def evict_before(self, time: int) -> None:
        self.start = min(max(self.start, time - self.offset), self.end)

    def make_room(self, *, before: int = 0, after: int = 1, rows: int) -> None:
        """Make room for ``before`` columns up to ``end``, ``after`` columns from there, and ``rows`` rows.

        Dimensions that must grow double, and evicted columns are reused once they are half of all columns, so
        the cost of copying is constant per column.
        """
        columns, wide = self._capacity
        if before <= self.end and self.end + after <= columns and rows <= wide:
            return
        used = self.end - self.start
        need = max(before, used) + after
        columns = columns if 2 * need <= columns else max(32, 2 * need)
        wide = wide if rows <= wide else max(rows, min(2 * wide, rows + 256))
        self._repack(columns, wide, end=max(before, used))

    def select(self, order: Tensor) -> None:
        """Keep the rows ``order`` [n], in this order; a row that keeps its place costs nothing."""
        n = len(order)
        unchanged = torch.arange(n, device=order.device)
        to = (order != unchanged).nonzero()[:, 0]
        if len(to):
            source = order[to]
            for tensor in self.tensors:
                used = tensor[self.start : self.end]
                used.index_copy_(-1, to, used.index_select(-1, source))
        self.rows = n
        columns, wide = self._capacity
        if 0 < 4 * n <= wide:  # a few remaining rows should be contiguous
            self._repack(columns, n, end=self.end)
        if n == 0:
            self.start = self.end = self.offset = 0
            if sum(memory.nbytes for memory in self._memory) > KEPT_BYTES:
                self._memory = [memory.new_empty(0) for memory in self._memory]
                self._repack(0, 0, end=0)

    def _repack(self, columns: int, wide: int, end: int) -> None:
        start = end - (self.end - self.start)
        rows = min(self.rows, wide)
        for i, tensor in enumerate(self.tensors):
            used = tensor[self.start : self.end, ..., :rows].clone()
            self.tensors[i] = self._lay_out(i, columns, wide)
            self.tensors[i][start:end, ..., :rows] = used
        self.offset += self.start - start
        self.start, self.end, self._capacity = start, end, (columns, wide)

    def _lay_out(self, i: int, columns: int, wide: int) -> Tensor:
        """Return tensor ``i`` in its memory, which never shrinks: fresh memory is slow to touch."""
        shape = self._middle[i]
        size = columns * wide * prod(shape)
        if size > len(self._memory[i]):
            # zeros, because attention multiplies masked values by 0, and the product must be 0
            self._memory[i] = _zeros(size, self._memory[i])
        memory = self._memory[i][:size]
        if self._rows_first:
            return memory.view(wide, shape[0], columns, shape[1]).permute(2, 1, 3, 0)
        return memory.view(columns, *shape, wide)


def _zeros(size: int, like: Tensor) -> Tensor:
    """Make zeros; on a CPU in separate pages, so that unused columns take no memory."""
    if like.device.type != "cpu":
        return like.new_zeros(size)
    return torch.frombuffer(mmap.mmap(-1, size * like.element_size()), dtype=like.dtype)
