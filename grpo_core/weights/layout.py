"""The layout of named tensors in one block of bytes, with a checksum for each tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from attrs import frozen

from grpo_core.errors import ModelError, WeightSyncError
from grpo_core.records import TensorInfo, Weights

_ALIGNMENT = 64
BUCKET = 64 << 20
"""Largest size in bytes of tensors that an engine takes at once, unless one alone is larger.

The largest tensor of most models is larger, so buckets cost an engine no memory beside it; and moving such a
bucket takes a hundred times as long as starting to.
"""


@frozen
class Bucket:
    """Consecutive tensors of a block."""

    begin: int
    end: int
    tensors: list[TensorInfo]


def buckets(weights: Weights) -> list[Bucket]:
    """Divide a block into buckets of whole tensors, each of ``BUCKET`` bytes at most or of one tensor."""
    found: list[Bucket] = []
    infos = sorted(weights.tensors, key=lambda info: info.offset)
    for info, end in zip(infos, [*(info.offset for info in infos[1:]), weights.nbytes], strict=True):
        if found and end - found[-1].begin <= BUCKET:
            found[-1] = Bucket(found[-1].begin, end, [*found[-1].tensors, info])
        else:
            found.append(Bucket(found[-1].end if found else 0, end, [info]))
    return found


@frozen(eq=False)
class LowRankSum:
    """A tensor that is computed when it is needed: ``base + left @ right``, in float32."""

    base: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor

    def computed(self) -> torch.Tensor:
        return torch.addmm(self.base.float(), self.left.float(), self.right.float())


class Writer(Protocol):
    """The trainer's side of a transport; owns the block of the published weights."""

    def write(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor | LowRankSum]],
        *,
        dtype: torch.dtype | None = None,
    ) -> Weights:
        """Copy the tensors into the block, over the version before; see ``pack``."""
        ...


class Contribution:
    """The ``Writer`` of a rank that does not publish: it sends its parts to the rank that does."""

    def write(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor | LowRankSum]],
        *,
        dtype: torch.dtype | None = None,
    ) -> Weights:
        for _, tensor in tensors:
            whole(tensor, _sent(tensor.base if isinstance(tensor, LowRankSum) else tensor, dtype))
        return Weights(version=version, location="", nbytes=0, tensors=())


def checksum(tensor: torch.Tensor) -> int:
    """Sum a tensor's bytes as little-endian integers of up to 8 bytes, modulo 2**64.

    It takes one pass at memory speed and detects lost, doubled and altered tensors.  It does not protect
    against an attacker.
    """
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    whole = flat.numel() // 8 * 8
    total = int(flat[:whole].view(torch.int64).sum()) if whole else 0
    return (total + int(flat[whole:].to(torch.int64).sum())) % 2**64


def pack(
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor | LowRankSum]],
    *,
    block: Callable[[int], torch.Tensor],
    location: Callable[[], str],
    dtype: torch.dtype | None = None,
) -> Weights:
    """Copy tensors into a block, one after the other.  Tied tensors appear once, under one name.

    Args:
        block: makes the block, uint8 [n], for a size in bytes; n may be larger.
        location: returns the location of the block.
        dtype: dtype of floating-point tensors in the block; None keeps theirs.  Integers and buffers
            (``torch.nn.Buffer``), such as the biases that choose experts, keep theirs in any case.
    """
    named = list(tensors)
    shaped = [tensor.base if isinstance(tensor, LowRankSum) else tensor for _, tensor in named]
    dtypes = [_sent(tensor, dtype) for tensor in shaped]
    offsets, nbytes = [], 0
    for tensor, sent in zip(shaped, dtypes, strict=True):
        offsets.append(nbytes)
        nbytes += -(-tensor.numel() * sent.itemsize // _ALIGNMENT) * _ALIGNMENT
    target = block(nbytes)
    infos = []
    for (name, given), tensor, sent, offset in zip(named, shaped, dtypes, offsets, strict=True):
        size = tensor.numel() * sent.itemsize
        there = target[offset : offset + size].view(sent).view(tensor.shape)
        there.copy_(whole(given, sent))
        infos.append(
            TensorInfo(
                name=name,
                dtype=str(sent).removeprefix("torch."),
                shape=tuple(there.shape),
                offset=offset,
                checksum=checksum(there),
            )
        )
    return Weights(version=version, location=location(), nbytes=nbytes, tensors=tuple(infos))


@torch.no_grad()
def whole(tensor: torch.Tensor | LowRankSum, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor without gradient; if the ranks of a trainer hold parts of it, all of them must ask.

    The parts are cast to ``dtype`` before they are sent; a tensor that is whole is returned as it is.
    """
    part: Any = (tensor.computed() if isinstance(tensor, LowRankSum) else tensor).detach()
    if not hasattr(part, "full_tensor"):  # of a DTensor, which takes long to import
        return cast(torch.Tensor, part)
    gathered: torch.Tensor = (part if dtype is None else part.to(dtype)).full_tensor()
    return gathered


def _sent(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype that a tensor is published in."""
    cast = tensor.is_floating_point() and not isinstance(tensor, torch.nn.Buffer)
    return dtype if dtype and cast else tensor.dtype


def unpack(infos: Iterable[TensorInfo], block: torch.Tensor, begin: int = 0) -> dict[str, torch.Tensor]:
    """Return tensors as views into a part, uint8 [n], of a block that begins at its byte ``begin``."""
    tensors = {}
    for info in infos:
        dtype = getattr(torch, info.dtype)
        size = torch.Size(info.shape).numel() * dtype.itemsize
        offset = info.offset - begin
        tensors[info.name] = block[offset : offset + size].view(dtype).view(info.shape)
    return tensors


def verify(version: int, infos: Iterable[TensorInfo], tensors: dict[str, torch.Tensor]) -> None:
    """Raise WeightSyncError if a tensor's checksum differs from the trainer's."""
    for info in infos:
        if (found := checksum(tensors[info.name])) != info.checksum:
            raise WeightSyncError(
                f"version {version}: tensor {info.name!r} {tuple(info.shape)} is not what the "
                f"trainer wrote (checksum {found:#x}, expected {info.checksum:#x})"
            )


def load_tensors(directory: Path) -> list[tuple[str, torch.Tensor]]:
    """Load the safetensors files of a model directory.  Raises ModelError if it has no such file."""
    from safetensors.torch import load_file

    files = sorted(directory.glob("*.safetensors"))
    if not files:
        raise ModelError(f"model {str(directory)!r}: there are no *.safetensors files in it")
    return [item for file in files for item in load_file(file).items()]
