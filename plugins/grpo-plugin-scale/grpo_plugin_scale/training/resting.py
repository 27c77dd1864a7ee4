"""Moves tensors to the machine's memory while an engine on the same GPU needs theirs, and back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from grpo_core.kit import room_for

SMALLEST = 1024
"""Bytes of a tensor below which it stays: its copy would cost more than it frees."""


class Resting:
    """Tensors that are on their device or, between two steps, in the machine's memory.

    Tensors stay the same objects, and so do views of them: the memory behind them is given back, and made
    anew.  Copies are in one pinned block, and kept from one step to the next: their memory is the price.
    """

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}
        """A copy of each storage that was away once, as bytes."""
        self._away: list[torch.UntypedStorage] = []

    @torch.no_grad()
    def leave(self, tensors: Iterable[Tensor]) -> int:
        """Copy tensors and give back their memory; return its bytes.  Their values cannot be read then."""
        storages = {memory_of(tensor): tensor.untyped_storage() for tensor in tensors}
        moved = {  # a storage that cannot be made anew stays, such as a file that is mapped
            key: storage
            for key, storage in storages.items()
            if storage.nbytes() >= SMALLEST and storage.resizable()
        }
        new = {  # which were never away, or have another size now; they get one block
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
        """Move everything back."""
        for storage in self._away:
            copy = self._copies[storage._cdata]
            storage.resize_(copy.nbytes)
            _bytes(storage).copy_(copy, non_blocking=True)
        self._wait()
        self._away.clear()

    def readable(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or the copy of one that is away."""
        copy = self._copies.get(memory_of(tensor))
        if copy is None or tensor.untyped_storage().nbytes():
            return tensor
        whole = copy.view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _wait(self) -> None:
        for gpu in {each.device for each in map(_bytes, self._away) if each.is_cuda}:
            torch.cuda.synchronize(gpu)  # by name: it need not be the current one


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def memory_of(tensor: Tensor) -> int:
    """Return what is equal for two tensors in one memory."""
    key: int = tensor.untyped_storage()._cdata
    return key
