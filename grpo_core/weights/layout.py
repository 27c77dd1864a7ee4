"""The layout of named tensors in a block of bytes, with a checksum for each tensor and each of its parts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from attrs import frozen

from grpo_core.contracts.errors import ModelError, WeightSyncError
from grpo_core.contracts.records import TensorInfo, TensorPart, Weights
from grpo_core.models.files import weight_files
from grpo_core.storage.published import FILE as RECORD
from grpo_core.storage.published import Published

_ALIGNMENT = 64
CONFIG, INDEX = "config.json", "model.safetensors.index.json"
BUCKET = 64 << 20
"""Largest size in bytes of a bucket of tensors, unless a single tensor is larger.

The largest tensor of most models is larger, so buckets cost an engine no additional memory; and moving such a
bucket takes a hundred times as long as starting the transfer.
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


def laid_out(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Return the offsets of consecutive items of these sizes in a block, and the size of the block."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // _ALIGNMENT) * _ALIGNMENT
    return offsets, end


@frozen
class Slice:
    """The rows of a bucket's tensors that one rank holds: consecutive bytes of the rank's block."""

    begin: int
    end: int
    pieces: list[tuple[int, int, int]]
    """Places of each tensor's rows in the slice and in the bucket, and their size in bytes."""


def slices(weights: Weights, rank: int) -> list[Slice]:
    """Return a rank's slice of each bucket; the whole bucket, if the trainer is one process."""
    found, begin = [], 0
    for bucket in buckets(weights):
        places = [_held(info, rank) for info in bucket.tensors]
        offsets, size = laid_out([nbytes for _, nbytes in places])
        pieces = [
            (offset, place - bucket.begin, nbytes)
            for offset, (place, nbytes) in zip(offsets, places, strict=True)
            if nbytes
        ]
        found.append(Slice(begin, begin + size, pieces))
        begin += size
    return found


def _held(info: TensorInfo, rank: int) -> tuple[int, int]:
    """Return the offset of a rank's rows in the whole block, and their size in bytes."""
    nbytes = torch.Size(info.shape).numel() * getattr(torch, info.dtype).itemsize
    if not info.parts:
        return info.offset, 0 if rank else nbytes
    row = nbytes // (info.shape[0] if info.shape else 1)
    for part in info.parts:
        if part.rank == rank:
            return info.offset + part.first * row, part.rows * row
    return info.offset, 0


@frozen(eq=False)
class LowRankSum:
    """A tensor that is computed when it is needed: ``base + left @ right``, in float32."""

    base: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor

    def computed(self) -> torch.Tensor:
        return torch.addmm(self.base.float(), self.left.float(), self.right.float())


def checksum(tensor: torch.Tensor, begin: int = 0, total: int | None = None) -> int:
    """Sum a tensor's bytes as little-endian integers of up to 8 bytes, modulo 2**64.

    It takes one pass at memory speed and detects lost, doubled and altered tensors.  It does not protect
    against an attacker.  The checksums of a tensor's parts add up to the tensor's checksum.

    Args:
        begin: place of the first byte in the whole tensor.
        total: size of the whole tensor in bytes; None if this is the whole.
    """
    flat = bytes_of(tensor)
    end = (len(flat) if total is None else total) // 8 * 8
    cut = min(max(end - begin, 0), len(flat))
    words, rest = flat[:cut], flat[cut:]
    if begin % 8 or cut % 8 or words.storage_offset() % 8:  # torch cannot view other bytes as integers
        words = torch.nn.functional.pad(words, (begin % 8, -(begin + cut) % 8))
    sums = int(words.view(torch.int64).sum()) if cut else 0
    return (sums + int(rest.to(torch.int64).sum())) % 2**64


def cast_weights(values: torch.Tensor, there: torch.Tensor) -> torch.Tensor:
    """Copy weights into a tensor of the dtype in which engines hold them: the one cast of masters."""
    return there.copy_(values)


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a tensor, uint8 [n]: a view, if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


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
    """Raise WeightSyncError if the checksum of a tensor, or of a part of it, differs from the trainer's."""
    for info in infos:
        rows = info.shape[0] if info.shape else 1
        alone = TensorPart(rank=0, first=0, rows=rows, checksum=info.checksum)
        flat = bytes_of(tensors[info.name])
        for part in info.parts or (alone,):
            begin, end = (len(flat) * row // max(rows, 1) for row in (part.first, part.first + part.rows))
            if (found := checksum(flat[begin:end], begin, len(flat))) == part.checksum:
                continue
            last = part.first + part.rows - 1
            rows_of = f" in rows {part.first} to {last}, which rank {part.rank} published,"
            where = rows_of if info.parts else ""
            raise WeightSyncError(
                f"version {version}: tensor {info.name!r} {tuple(info.shape)}{where} is not what the trainer "
                f"wrote (checksum {found:#x}, expected {part.checksum:#x})"
            )


def load_tensors(directory: Path) -> list[tuple[str, torch.Tensor]]:
    """Load the safetensors files of a model directory; see ``load_held``.

    Raises ModelError if they are missing, or are not what the engine held.
    """
    try:
        files = weight_files(directory)
    except OSError as error:
        raise ModelError(f"model {str(directory)!r}: {error}") from error
    record = Published.read(directory)
    return [item for file in files for item in load_held(file, record).items()]


def load_held(file: Path, record: Published | None) -> Mapping[str, torch.Tensor]:
    """Load a safetensors file; a checkpoint's masters become what the engine of training held.

    Raises ModelError if their checksums differ.
    """
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = load_file(file)
    if record is None:
        return tensors
    for name, masters in tensors.items():
        usual = record.dtype if masters.is_floating_point() else str(masters.dtype).removeprefix("torch.")
        dtype, _ = record.tensors.get(name, (usual, None))
        tensors[name] = cast_weights(masters, torch.empty(masters.shape, dtype=getattr(torch, dtype)))
        record.check([(name, dtype, checksum(tensors[name]))])
    return tensors


def write_held(directory: Path, target: Path) -> None:
    """Write a checkpoint's model as the engine of training held it; an interrupted copy lacks config.json."""
    from safetensors.torch import save_file

    if (target / CONFIG).exists():
        return
    target.mkdir(parents=True, exist_ok=True)
    record = Published.read(directory)
    weights, size = weight_files(directory) if record is not None else [], 0
    for path in weights:
        tensors = load_held(path, record)
        size += sum(tensor.nbytes for tensor in tensors.values())
        save_file(dict(tensors), target / path.name, metadata={"format": "pt"})
    others = {path for path in directory.iterdir() if path.is_file()} - {*weights, directory / RECORD}
    for path in sorted(others, key=lambda path: path.name == CONFIG):
        shutil.copyfile(path, target / path.name)
    if size and (index := target / INDEX).exists():
        table = json.loads(index.read_text(encoding="utf-8"))
        table["metadata"] = {**table.get("metadata", {}), "total_size": size}
        index.write_text(f"{json.dumps(table, indent=2)}\n", encoding="utf-8")
