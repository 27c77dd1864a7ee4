"""Copies of published weights that outlive the trainer's next publication.

The trainer's next ``publish`` overwrites the weights before.  Late engines of a pool, and workers on other
machines, read a copy instead.  This module needs no torch.  A copy keeps the checksums of
``grpo_core.weights.shm``, so an engine verifies it like the original.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import tempfile
import weakref
from typing import Any

from attrs import evolve, frozen

from grpo_core.contracts.errors import WeightSyncError
from grpo_core.contracts.records import Weights
from grpo_core.plugins.transports import transport_of


@frozen(kw_only=True, eq=False)
class WeightsLease:
    """Weights that stay readable as long as this object is alive."""

    weights: Weights
    memory: Any = None
    """An object that keeps the memory alive."""


def mapped(weights: Weights) -> mmap.mmap:
    """Map the bytes of all tensors.  Raises WeightSyncError if they cannot be read."""
    try:
        with open(weights.location, "rb") as file:
            return mmap.mmap(file.fileno(), weights.nbytes, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise unreadable(weights, error) from None


class Copies:
    """A pool of buffers for copies; a buffer is reused once its lease is garbage-collected."""

    def __init__(self) -> None:
        self._free: list[tuple[int, mmap.mmap]] = []

    async def hold(self, weights: Weights) -> WeightsLease:
        """Copy weights published in shared memory; return weights that engines of any machine can read.

        Raises WeightSyncError if the shared memory cannot be read.
        """
        if transport_of(weights.location).remote:
            return WeightsLease(weights=weights)
        return await asyncio.to_thread(lambda: self.copy(weights, mapped(weights)))

    def copy(self, weights: Weights, data: mmap.mmap | memoryview) -> WeightsLease:
        """Copy ``data``, the bytes of ``weights``, for the processes of this machine."""
        file, memory = self._take(weights.nbytes)
        memory[: weights.nbytes] = data[: weights.nbytes]
        here = evolve(weights, location=f"/proc/{os.getpid()}/fd/{file}")
        held = WeightsLease(weights=here)
        weakref.finalize(held, self._free.append, (file, memory)).atexit = False
        return held

    def _take(self, nbytes: int) -> tuple[int, mmap.mmap]:
        while self._free:
            file, memory = self._free.pop()
            if len(memory) == nbytes:
                return file, memory
            memory.close()
            os.close(file)
        file = anonymous_file("grpo-core-copy")
        os.ftruncate(file, nbytes)
        return file, mmap.mmap(file, nbytes)


def anonymous_file(name: str) -> int:
    """Make a file in memory and return its descriptor; it has no name and vanishes with its process."""
    if hasattr(os, "memfd_create"):
        made = os.memfd_create(name)
        os.fchmod(made, 0o600)  # the kernel already lets only its user open it through /proc
        return made
    return os.dup(tempfile.TemporaryFile().fileno())  # pragma: no cover - not on Linux


def unreadable(weights: Weights, error: Exception) -> WeightSyncError:
    """Make the error for shared memory that cannot be mapped."""
    return WeightSyncError(
        f"version {weights.version}: the trainer's shared memory {weights.location} cannot be read "
        f"({error}); it is read on the machine of the trainer, under its user"
    )
