"""Room on the host for copies of many tensors, in one block.

A block that GPUs copy into is pinned once, as a whole.  torch would pin each tensor alone and round its size
up to a power of two, which takes up to twice the memory.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

ALIGNED = 64
"""Bytes of which each tensor's place is a multiple: of any item's size, and of a line of the cache."""
_PORTABLE = 1
"""CUDA's flag for memory that is pinned for all GPUs of the process."""


def room_for(tensors: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
    """Return tensors on the host with the shapes, dtypes and strides of these, and any contents.

    Each has a storage of its own, since who writes a model to disk copies tensors that share one.  The block
    is freed with the last of them.

    Args:
        pinned: whether GPUs copy into the block.
    """
    places, end = [], 0
    for tensor in tensors:
        places.append(end)
        end += -(-tensor.nbytes // ALIGNED) * ALIGNED
    block = _block(end, pinned=pinned) if end else None
    return [_part(block, place, _shape(tensor)) for place, tensor in zip(places, tensors, strict=True)]


def _shape(tensor: Tensor) -> Tensor:
    """Return a tensor without memory; a strided one keeps its strides, so that a copy is one of bytes."""
    return torch.empty_like(tensor, device="meta")


def _part(block: mmap.mmap | None, place: int, like: Tensor) -> Tensor:
    if block is None or not like.numel():
        return torch.empty_like(like, device="cpu")
    flat = torch.frombuffer(block, dtype=like.dtype, count=like.numel(), offset=place)
    return flat.as_strided(like.shape, like.stride())


class _Block(mmap.mmap):
    """Memory that CUDA lets go of before it is unmapped; a finalizer would be called after that."""

    _release: Callable[[], object] | None = None

    def pin(self) -> None:
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        address = torch.frombuffer(self, dtype=torch.uint8).data_ptr()
        torch.cuda.check_error(runtime.cudaHostRegister(address, len(self), _PORTABLE))
        self._release = partial(runtime.cudaHostUnregister, address)

    def __del__(self) -> None:
        if self._release is not None and not sys.is_finalizing():  # CUDA may have ended by then
            self._release()


def _block(nbytes: int, *, pinned: bool) -> mmap.mmap:
    block = _Block(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if pinned:
        block.pin()
    return block
