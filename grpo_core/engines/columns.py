"""Tensors along which all rows of a batch move together: [column, ..., row].

Each decoding step fills one column for every row.  Columns are appended on the right and forgotten on the
left; rows are appended at the end and removed by moving others into their places.  *Time* counts columns
since the beginning: it does not change when the content is moved to other columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Allocate = Callable[[tuple[int, ...], torch.dtype], Tensor]


class Columns:
    """The columns ``start`` to ``end`` of the first ``rows`` rows of each of ``tensors`` are in use."""

    def __init__(self, middle: Sequence[tuple[tuple[int, ...], torch.dtype]], allocate: Allocate) -> None:
        """``middle``: the dimensions between column and row of each tensor, and its dtype."""
        self._middle = middle
        self._allocate = allocate
        self._capacity = (0, 0)
        self.tensors: list[Tensor] = [allocate((0, *shape, 0), dtype) for shape, dtype in middle]
        self.start = self.end = self.rows = 0
        self.offset = 0
        """Time of column 0."""

    @property
    def time(self) -> int:
        """Of the next column."""
        return self.end + self.offset

    def forget_before(self, time: int) -> None:
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
        if 0 < 2 * n <= wide:  # narrow rows lie closer together
            self._repack(columns, n, end=self.end)
        if n == 0:
            self.start = self.end = self.offset = 0

    def _repack(self, columns: int, wide: int, end: int) -> None:
        start = end - (self.end - self.start)
        rows = min(self.rows, wide)
        for i, (shape, dtype) in enumerate(self._middle):
            old = self.tensors[i][self.start : self.end, ..., :rows]
            if (columns, wide) == self._capacity:
                old = old.clone()
            else:
                self.tensors[i] = self._allocate((columns, *shape, wide), dtype)
            self.tensors[i][start:end, ..., :rows] = old
        self.offset += self.start - start
        self.start, self.end, self._capacity = start, end, (columns, wide)
