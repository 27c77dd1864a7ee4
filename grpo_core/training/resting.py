"""Moves tensors to the machine's memory while an engine on the same GPU needs theirs, and back."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

SMALLEST = 1024
"""Bytes of a tensor below which it stays: its copy would cost more than it frees."""


class Resting:
    """Tensors that are on their device or, between two steps, in the machine's memory.

    Tensors stay the same objects, and so do views of them: the memory behind them is given back, and made
    anew.  Copies are pinned, and kept from one step to the next: their memory is the price.
    """

    def __init__(self) -> None:
        self._copies: dict[int, Tensor] = {}
        """A copy of each storage that was away once, as bytes."""
        self._away: list[torch.UntypedStorage] = []

    @torch.no_grad()
    def leave(self, tensors: Iterable[Tensor]) -> int:
        """Copy tensors and give back their memory; return its bytes.  Their values cannot be read then."""
        storages = {_key(tensor): tensor.untyped_storage() for tensor in tensors}
        for key, storage in storages.items():
            nbytes = storage.nbytes()
            if nbytes < SMALLEST or not storage.resizable():  # such as a file that is mapped
                continue
            copy = self._copies.get(key)
            if copy is None or copy.nbytes != nbytes:
                copy = torch.empty(nbytes, dtype=torch.uint8, pin_memory=storage.is_cuda)
                self._copies[key] = copy
            copy.untyped_storage().copy_(storage, non_blocking=True)
            self._away.append(storage)
        self._wait()
        given = sum(storage.nbytes() for storage in self._away)
        for storage in self._away:
            storage.resize_(0)
        return given

    @torch.no_grad()
    def come_back(self) -> None:
        """Restore what is away."""
        for storage in self._away:
            copy = self._copies[storage._cdata]
            storage.resize_(copy.nbytes)
            storage.copy_(copy.untyped_storage(), non_blocking=True)
        self._wait()
        self._away.clear()

    def readable(self, tensor: Tensor) -> Tensor:
        """Return the tensor, or the copy of one that is away."""
        copy = self._copies.get(_key(tensor))
        if copy is None or tensor.untyped_storage().nbytes():
            return tensor
        whole = copy.view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _wait(self) -> None:
        if any(storage.is_cuda for storage in self._away):
            torch.cuda.synchronize()


def _key(tensor: Tensor) -> int:
    """Return what is equal for two tensors in one memory."""
    key: int = tensor.untyped_storage()._cdata
    return key
