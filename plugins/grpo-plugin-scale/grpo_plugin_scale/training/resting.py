"""Offloads tensors to host memory while an engine on the same GPU needs the space."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from grpo_core.training.host_block import room_for

SMALLEST = 1024
"""Size in bytes below which a tensor is not offloaded: copying would cost more than it frees."""


class Resting:
    """Tensors that are on their device, or in host memory between two steps.

    Tensors and views stay the same objects; only their storage is freed and reallocated.  Copies are in one
    pinned block that is kept between steps, at the price of its memory.
    """

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}
        """Byte copies of all storages that were offloaded before."""
        self._away: list[torch.UntypedStorage] = []

    @torch.no_grad()
    def leave(self, tensors: Iterable[Tensor]) -> int:
        """Offload tensors; return the freed bytes.  Their values are unreadable until ``come_back``."""
        storages = {memory_of(tensor): tensor.untyped_storage() for tensor in tensors}
        moved = {  # storages that cannot be resized stay, such as mapped files
            key: storage
            for key, storage in storages.items()
            if storage.nbytes() >= SMALLEST and storage.resizable()
        }
        new = {  # new or resized storages share one new block
            key: _bytes(storage)
            for key, storage in moved.items()
            if key not in self._copies or self._copies[key].nbytes != storage.nbytes()
        }
        on_gpu = any(tensor.is_cuda for tensor in new.values())
        self._copies |= zip(new, room_for(list(new.values()), pinned=on_gpu), strict=True)
        for key, storage in moved.items():
            self._copies[key].copy_(_bytes(storage), non_blocking=True)
            self._away.append(storage)
        self._wait()
        given = sum(storage.nbytes() for storage in self._away)
        for storage in self._away:
            storage.resize_(0)
        return given

    @torch.no_grad()
    def come_back(self) -> None:
        """Restore all tensors."""
        for storage in self._away:
            copy = self._copies[storage._cdata]
            storage.resize_(copy.nbytes)
            _bytes(storage).copy_(copy, non_blocking=True)
        self._wait()
        self._away.clear()

    def readable(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or its copy if it is offloaded."""
        copy = self._copies.get(memory_of(tensor))
        if copy is None or tensor.untyped_storage().nbytes():
            return tensor
        whole = copy.view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _wait(self) -> None:
        for gpu in {each.device for each in map(_bytes, self._away) if each.is_cuda}:
            torch.cuda.synchronize(gpu)  # explicit, since it may not be the current device


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def memory_of(tensor: Tensor) -> int:
    """Return a key of a tensor's storage."""
    key: int = tensor.untyped_storage()._cdata
    return key
