"""Room on the host for copies of many tensors, in one block.

A block that GPUs copy into is pinned once, as a whole.  torch would pin each tensor alone and round its size
up to a power of two, which takes up to twice the memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from grpo_core.weights.layout import laid_out
from grpo_core.weights.shm import Pinnable


def room_for(tensors: Sequence[Tensor], *, pinned: bool) -> list[Tensor]:
    """Return uninitialized host tensors with the shapes, dtypes and strides of these.

    Each has a separate storage, since code that writes a model to disk copies tensors that share one.  The
    block is freed with the last of them.

    Args:
        pinned: whether GPUs copy into the block.
    """
    offsets, nbytes = laid_out([tensor.nbytes for tensor in tensors])
    block = Pinnable(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) if nbytes else None
    if block is not None and pinned:
        block.pin()
    made = []
    for tensor, offset in zip(tensors, offsets, strict=True):
        like = torch.empty_like(tensor, device="meta")  # strides are kept, so that a copy moves bytes only
        if block is None or not like.numel():
            made.append(torch.empty_like(like, device="cpu"))
            continue
        flat = torch.frombuffer(block, dtype=like.dtype, count=like.numel(), offset=offset)
        made.append(flat.as_strided(like.shape, like.stride()))
    return made
