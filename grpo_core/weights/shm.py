"""Weights in shared memory, for the processes of one machine.

The trainer writes each version into one memory file that it owns.  The file has no name on any disk and
vanishes with the trainer, however it dies; engines open it through ``/proc`` and copy what they need.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from typing import BinaryIO

import torch

from grpo_core.records import Weights
from grpo_core.weights import anonymous_file
from grpo_core.weights.layout import LowRankSum, pack


class SharedMemoryWriter:
    """Owns the shared memory of one trainer; each ``write`` replaces its contents."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._map: mmap.mmap | None = None

    def write(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor | LowRankSum]],
        *,
        dtype: torch.dtype | None = None,
    ) -> Weights:
        """Copy the tensors into shared memory."""
        return pack(
            version,
            tensors,
            block=lambda nbytes: torch.frombuffer(self._memory(nbytes), dtype=torch.uint8),
            location=lambda: f"/proc/{os.getpid()}/fd/{self._file}",
            dtype=dtype,
        )

    def _memory(self, nbytes: int) -> mmap.mmap:
        if self._map is None or len(self._map) < nbytes:
            self._file = anonymous_file("grpo-core-weights")
            os.ftruncate(self._file, nbytes)
            self._map = mmap.mmap(self._file, nbytes)
        return self._map


def mapped(weights: Weights) -> torch.Tensor:
    """Map the block, uint8 [nbytes].  Raises OSError or ValueError if that is not possible."""
    with open(weights.location, "r+b") as file:
        status = os.fstat(file.fileno())
        return _mapped(status.st_dev, status.st_ino, weights.nbytes, file)


_mappings: dict[tuple[int, int, int], torch.Tensor] = {}
"""The last mapping; mapping the same memory again would cost a page fault for every 4 KiB."""


def _mapped(device: int, inode: int, nbytes: int, file: BinaryIO) -> torch.Tensor:
    key = (device, inode, nbytes)
    if key not in _mappings:
        _mappings.clear()
        _mappings[key] = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
    return _mappings[key]
