"""Weights on their way from the trainer to an engine of the same machine: shared memory, checked.

The trainer writes each version into one memory file that it owns.  The file has no name on any disk and
vanishes with the trainer, however it dies; engines open it through ``/proc`` and copy what they need.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import torch

from grpo_core.errors import ModelError, WeightSyncError
from grpo_core.records import TensorInfo, Weights

_ALIGNMENT = 64


def checksum(tensor: torch.Tensor) -> int:
    """Sum of a tensor's bytes read as little-endian integers of up to 8 bytes, modulo 2**64.

    One pass at memory speed.  It tells a lost, doubled or altered tensor; it is no protection against
    somebody who means harm.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    total = int(flat[:whole].view(torch.int64).sum()) if whole else 0
    return (total + int(flat[whole:].to(torch.int64).sum())) % 2**64


class WeightsWriter:
    """Owns the memory that one trainer publishes in; each ``write`` replaces what was there."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._map: mmap.mmap | None = None

    def write(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Weights:
        """Copy the tensors into shared memory.  Tied tensors are given once, under one name."""
        named = [(name, tensor.detach()) for name, tensor in tensors]
        offsets, nbytes = [], 0
        for _, tensor in named:
            offsets.append(nbytes)
            nbytes += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
        target = torch.frombuffer(self._memory(nbytes), dtype=torch.uint8)
        infos = []
        for (name, tensor), offset in zip(named, offsets, strict=True):
            size = tensor.numel() * tensor.element_size()
            there = target[offset : offset + size].view(tensor.dtype).view(tensor.shape)
            there.copy_(tensor)
            infos.append(
                TensorInfo(
                    name=name,
                    dtype=str(tensor.dtype).removeprefix("torch."),
                    shape=tuple(tensor.shape),
                    offset=offset,
                    checksum=checksum(there),
                )
            )
        location = f"/proc/{os.getpid()}/fd/{self._file}"
        return Weights(version=version, location=location, nbytes=nbytes, tensors=tuple(infos))

    def _memory(self, nbytes: int) -> mmap.mmap:
        if self._map is None or len(self._map) < nbytes:
            self._file = _anonymous_file()
            os.ftruncate(self._file, nbytes)
            self._map = mmap.mmap(self._file, nbytes)
        return self._map


def _anonymous_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("grpo-core-weights")
    return os.dup(tempfile.TemporaryFile().fileno())  # pragma: no cover - not on Linux


def read(weights: Weights) -> dict[str, torch.Tensor]:
    """The tensors as views into the shared memory: copy them before the trainer publishes again.

    Raises WeightSyncError if the memory is gone or a tensor's checksum is not the trainer's.
    """
    tensors = views(weights)
    for info in weights.tensors:
        if (found := checksum(tensors[info.name])) != info.checksum:
            raise WeightSyncError(
                f"version {weights.version}: tensor {info.name!r} {tuple(info.shape)} is not what the "
                f"trainer wrote (checksum {found:#x}, expected {info.checksum:#x})"
            )
    return tensors


def views(weights: Weights) -> dict[str, torch.Tensor]:
    """As ``read``, without reading a byte.  Raises WeightSyncError if the memory is gone."""
    try:
        with open(weights.location, "r+b") as file:
            status = os.fstat(file.fileno())
            source = _mapped(status.st_dev, status.st_ino, weights.nbytes, file)
    except (OSError, ValueError) as error:
        raise WeightSyncError(
            f"version {weights.version}: the trainer's shared memory {weights.location} cannot be read "
            f"({error}); trainer and engine must run on one machine, under one user"
        ) from None
    tensors = {}
    for info in weights.tensors:
        dtype = getattr(torch, info.dtype)
        size = torch.Size(info.shape).numel() * dtype.itemsize
        tensors[info.name] = source[info.offset : info.offset + size].view(dtype).view(info.shape)
    return tensors


_mappings: dict[tuple[int, int, int], torch.Tensor] = {}
"""The last one: to map the same memory again costs a page fault for each 4 KiB of it."""


def _mapped(device: int, inode: int, nbytes: int, file: BinaryIO) -> torch.Tensor:
    key = (device, inode, nbytes)
    if key not in _mappings:
        _mappings.clear()
        _mappings[key] = torch.frombuffer(mmap.mmap(file.fileno(), nbytes), dtype=torch.uint8)
    return _mappings[key]


def load_tensors(directory: Path) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a model directory's safetensors files.  Raises ModelError if it has none."""
    from safetensors.torch import load_file

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"model {str(directory)!r}: there are no *.safetensors files in it")
    return [item for file in files for item in load_file(file).items()]
