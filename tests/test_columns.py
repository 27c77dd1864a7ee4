"""The memory of rows that are decoded together: what it keeps, and what it gives back."""

import pytest
import torch

from grpo_core.engines.local import columns
from grpo_core.engines.local.columns import Columns


def test_memory_above_the_limit_is_returned_with_the_last_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "KEPT_BYTES", 4 * 32 * 8)
    for rows, stays in ((8, True), (9, False)):
        content = Columns([((), torch.float32)], torch.device("cpu"))
        content.make_room(rows=rows)
        content.rows, content.end = rows, 1
        content.select(torch.arange(0))
        assert (content.tensors[0].numel() > 0) is stays


def test_rows_find_room_again_after_the_memory_was_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(columns, "KEPT_BYTES", 0)
    content = Columns([((2,), torch.float32)], torch.device("cpu"))
    for _ in range(2):
        content.make_room(before=3, rows=5)
        content.rows, content.end = 5, 3
        content.tensors[0][:3] = 1.0
        content.make_room(after=100, rows=7)
        assert content.tensors[0][content.start : content.end, :, :5].eq(1).all()
        assert content.tensors[0][content.end :].eq(0).all(), "attention multiplies it by 0"
        content.select(torch.arange(0))
        assert (content.start, content.end, content.rows) == (0, 0, 0)
