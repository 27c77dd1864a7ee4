"""Weights in shared memory, for the processes of one machine.

The trainer writes each version into one memory file that it owns.  The file has no name on any disk and
vanishes with the trainer, however it dies; engines open it through ``/proc`` and copy what they need.  The
ranks of a trainer open it in the same way, to write: their parts form the whole tensors in the file, and each
rank touches only the pages of its part.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch

from grpo_core.contracts.errors import WeightSyncError
from grpo_core.contracts.records import Weights
from grpo_core.storage.copies import anonymous_file, unreadable
from grpo_core.weights.layout import LowRankSum
from grpo_core.weights.publishing import ALONE, Publishers, pack

if TYPE_CHECKING:
    from grpo_core.config.run import TrainerSetup


_PORTABLE = 1
"""CUDA's flag for memory that is pinned for all GPUs of the process."""


class Pinnable(mmap.mmap):
    """Memory that is unregistered from CUDA before it is unmapped; a finalizer would run too late."""

    _release: Callable[[], object] | None = None

    def pin(self) -> None:
        """Pin the memory, so that GPUs copy into it directly."""
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        torch.cuda.check_error(runtime.cudaHostRegister(address, len(self), _PORTABLE))
        self._release = partial(runtime.cudaHostUnregister, address)

    def __del__(self) -> None:
        if self._release is not None and not sys.is_finalizing():  # CUDA may have ended by then
            self._release()


class SharedMemoryWriter:
    """Owns the shared memory of one trainer; each ``write`` replaces its contents.

    Args:
        ranks: the processes that write it together; None for a single process.  The first one owns it, and
            each of the others opens it and writes its rows.
        pinned: whether GPUs copy into it.
    """

    def __init__(self, ranks: Publishers | None = None, *, pinned: bool = False) -> None:
        self._ranks, self._pinned = ranks or ALONE, pinned
        self._location = ""
        self._map: Pinnable | None = None

    def write(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor | LowRankSum]],
        *,
        dtype: torch.dtype | None = None,
    ) -> Weights:
        """Copy the tensors into shared memory.  Raises WeightSyncError if a rank cannot open it."""
        return pack(
            version,
            tensors,
            block=lambda nbytes: torch.frombuffer(self._memory(nbytes), dtype=torch.uint8),
            location=lambda: self._location,
            dtype=dtype,
            ranks=self._ranks,
        )

    def _memory(self, nbytes: int) -> Pinnable:
        before = self._map
        if self._ranks.rank == 0 and (self._map is None or len(self._map) < nbytes):
            file = anonymous_file("grpo-core-weights")
            os.ftruncate(file, nbytes)
            self._map, self._location = Pinnable(file, nbytes), f"/proc/{os.getpid()}/fd/{file}"
        location = self._ranks.gathered(self._location)[0]
        if self._map is None or location != self._location:
            self._map, self._location = _of_first_rank(location), location
        if self._pinned and self._map is not before:
            self._map.pin()
        return self._map


def _of_first_rank(location: str) -> Pinnable:
    """Map the memory to which all ranks write.  Raises WeightSyncError."""
    try:
        with open(location, "r+b") as file:
            return Pinnable(file.fileno(), 0)
    except (OSError, ValueError) as error:
        raise WeightSyncError(
            f"the shared memory {location} of the trainer's rank 0 cannot be written ({error}); all ranks of "
            "a trainer run on one machine, under one user"
        ) from None


def writer(setup: TrainerSetup, device: torch.device, ranks: Publishers) -> SharedMemoryWriter:
    """Return the writer of a trainer's rank."""
    return SharedMemoryWriter(ranks, pinned=device.type == "cuda")


_mappings: dict[tuple[int, int, int], torch.Tensor] = {}
"""The last mapping, kept because mapping the same memory again costs a page fault for every 4 KiB."""


def read(weights: Weights, device: torch.device | None = None) -> torch.Tensor:
    """Map the block, uint8 [nbytes].  Raises WeightSyncError if that is not possible."""
    try:
        with open(weights.location, "r+b") as file:
            status = os.fstat(file.fileno())
            key = status.st_dev, status.st_ino, weights.nbytes
            if key not in _mappings:
                _mappings.clear()
                _mappings[key] = torch.frombuffer(mmap.mmap(file.fileno(), weights.nbytes), dtype=torch.uint8)
            return _mappings[key]
    except (OSError, ValueError) as error:
        raise unreadable(weights, error) from None
