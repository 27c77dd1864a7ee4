"""Room on the host for copies of many tensors, in one block.

A block that GPUs copy into is pinned once, as a whole.  torch would pin each tensor alone and round its size
up to a power of two, which takes up to twice the memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_core.weights.shm import Pinnable

ALIGNED = 64
"""Bytes of which each tensor's place is a multiple: of any item's size, and of a line of the cache."""


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


def _block(nbytes: int, *, pinned: bool) -> mmap.mmap:
    block = Pinnable(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if pinned:
        block.pin()
    return block
