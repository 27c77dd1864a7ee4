"""Copies of published weights, which last while the trainer publishes others.

What a trainer publishes is overwritten by its next ``publish``.  A pool gives weights to engines that are
late, and a worker on another machine has not got the trainer's memory at all: both read a copy.  Needs no
torch; the checksums of ``grpo_core.weights.shm`` go along, so that a copy is checked as the original is.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import weakref
from typing import Any

from attrs import evolve, frozen

from grpo_core.records import Weights
from grpo_core.weights import COLLECTIVE, anonymous_file, unreadable


@frozen(kw_only=True, eq=False)
class WeightsLease:
    """Weights that stay readable for as long as somebody has this object."""

    weights: Weights
    memory: Any = None
    """What has to be kept alive for that."""


def mapped(weights: Weights) -> mmap.mmap:
    """The bytes of all tensors.  Raises WeightSyncError if they cannot be read."""
    try:
        with open(weights.location, "rb") as file:
            return mmap.mmap(file.fileno(), weights.nbytes, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise unreadable(weights, error) from None


class Copies:
    """Owns the memory of copies; that of a copy which nobody has any more is used for another one."""

    def __init__(self) -> None:
        self._free: list[tuple[int, mmap.mmap]] = []

    async def hold(self, weights: Weights) -> WeightsLease:
        """A copy of what a trainer of this machine has published; none of what it sends to whoever asks.

        Raises WeightSyncError.
        """
        if weights.location.startswith(COLLECTIVE):
            return WeightsLease(weights=weights)
        return await asyncio.to_thread(lambda: self.copy(weights, mapped(weights)))

    def copy(self, weights: Weights, data: mmap.mmap | memoryview) -> WeightsLease:
        """A copy of ``weights``, whose bytes are ``data``, for the processes of this machine."""
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
