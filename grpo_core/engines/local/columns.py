"""Tensors along which all rows of a batch move together: [column, ..., row].

Each decoding step fills one column for every row.  Columns are appended on the right and forgotten on the
left; rows are appended at the end and removed by moving others into their places.  *Time* counts columns
since the beginning: it does not change when the content is moved to other columns.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

KEPT_BYTES = 64 << 20
"""Memory that is kept when no row is left, since fresh memory is slow to touch; more is given back."""


class Columns:
    """The columns ``start`` to ``end`` of the first ``rows`` rows of each of ``tensors`` are in use.

    Args:
        middle: the dimensions between column and row of each tensor, and its dtype.
        rows_first: lay the memory out as [row, middle[0], column, middle[1]]; else as it is indexed.
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
        """Time of column 0."""

    @property
    def time(self) -> int:
        """Of the next column."""
        return self.end + self.offset

    def evict_before(self, time: int) -> None:
        self.start = min(max(self.start, time - self.offset), self.end)

    def make_room(self, *, before: int = 0, after: int = 1, rows: int) -> None:
        """Let ``before`` columns end at ``end``, ``after`` columns begin there, and ``rows`` rows fit.

        What has to grow doubles, and what is forgotten is reused only once it is half of the columns:
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
        """Keep the rows ``order`` [n], in that order; a row that keeps its place costs nothing."""
        n = len(order)
        places = torch.arange(n, device=order.device)
        to = (order != places).nonzero()[:, 0]
        if len(to):
            source = order[to]
            for tensor in self.tensors:
                used = tensor[self.start : self.end]
                used.index_copy_(-1, to, used.index_select(-1, source))
        self.rows = n
        columns, wide = self._capacity
        if 0 < 4 * n <= wide:  # few rows should lie close together
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
        """Tensor ``i`` in its memory, which only ever grows: fresh memory is slow to touch."""
        shape = self._middle[i]
        size = columns * wide * prod(shape)
        if size > len(self._memory[i]):
            # zeros, because attention multiplies what it must not see by 0, and that must be 0
            self._memory[i] = _zeros(size, self._memory[i])
        memory = self._memory[i][:size]
        if self._rows_first:
            return memory.view(wide, shape[0], columns, shape[1]).permute(2, 1, 3, 0)
        return memory.view(columns, *shape, wide)


def _zeros(size: int, like: Tensor) -> Tensor:
    """On a CPU in pages of its own: a column takes memory once it is used, and all of it goes at once."""
    if like.device.type != "cpu":
        return like.new_zeros(size)
    return torch.frombuffer(mmap.mmap(-1, size * like.element_size()), dtype=like.dtype)
