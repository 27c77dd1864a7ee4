"""Rows that are read by index; workers of loaders import them."""

from __future__ import annotations

from typing import Any

N = 400


def row(i: int) -> dict[str, Any]:
    return {"prompt": f"row {i}", "answer": str(i)}


class Rows:
    """A data set that is read by index."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict[str, Any]:
        if not 0 <= i < N:
            raise IndexError(i)
        return row(i)
