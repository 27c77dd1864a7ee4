"""Copies the tensors of a trainer into the block from which engines take them.

Where the ranks of a trainer hold parts of the tensors, each rank copies the rows that it holds to their
place, and no rank gathers a tensor.  The ranks exchange only the checksums of their rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from attrs import frozen

from grpo_core.contracts.errors import WeightSyncError
from grpo_core.contracts.records import TensorInfo, TensorPart, Weights
from grpo_core.weights.layout import LowRankSum, cast_weights, checksum, laid_out

T = TypeVar("T")


class Publishers(Protocol):
    """The processes that publish together, such as the ranks of a trainer; all make the same calls."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gathered(self, value: T) -> list[T]:
        """Return the values of all processes, in the order of their ranks: plain data, as in JSON."""
        ...


@frozen
class OnePublisher:
    """A process that publishes alone."""

    rank, size = 0, 1

    def gathered(self, value: T) -> list[T]:
        return [value]


ALONE = OnePublisher()


class Writer(Protocol):
    """The trainer's side of a transport; owns the block of the published weights."""

    def write(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor | LowRankSum]],
        *,
        dtype: torch.dtype | None = None,
    ) -> Weights:
        """Copy the tensors into the block, which overwrites the version before; see ``pack``.

        All ranks of a trainer call it, and it returns when all of them have copied.
        """
        ...


def pack(
    version: int,
    tensors: Iterable[tuple[str, torch.Tensor | LowRankSum]],
    *,
    block: Callable[[int], torch.Tensor],
    location: Callable[[], str],
    dtype: torch.dtype | None = None,
    ranks: Publishers = ALONE,
    apart: bool = False,
) -> Weights:
    """Copy tensors into a block, one after the other.  Tied tensors appear once, under one name.

    Args:
        block: makes the block, uint8 [n], for a size in bytes; n may be larger.
        location: returns the location of the block.
        dtype: dtype of floating-point tensors in the block; None keeps theirs.  Integers and buffers
            (``torch.nn.Buffer``), such as the biases that choose experts, keep theirs in any case.
        ranks: the processes, each of which copies the rows that it holds.
        apart: whether each of them has a separate block for its rows; see ``layout.slices``.  Otherwise all
            write to one block, where the rows form the whole tensors.
    """
    shares = [_share(name, tensor, dtype, ranks) for name, tensor in tensors]
    offsets, nbytes = laid_out([share.nbytes for share in shares])
    places, size = [offset + share.begin for share, offset in zip(shares, offsets, strict=True)], nbytes
    if apart:
        places, size = laid_out([share.held for share in shares])
    target = block(size)
    copied = [share.copied(target, place) for share, place in zip(shares, places, strict=True)]
    infos = _described(shares, offsets, ranks.gathered(copied))
    return Weights(version=version, location=location(), nbytes=nbytes, tensors=infos)


@torch.no_grad()
def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without gradient; if ranks hold parts of it, all of them must call this."""
    part: Any = tensor.detach()
    return cast(torch.Tensor, part.full_tensor() if _is_divided(part) else part)


@frozen(eq=False)
class _Share:
    """The rows of a tensor that this process copies; a tensor without dimensions is one row."""

    name: str
    given: torch.Tensor | LowRankSum
    dtype: torch.dtype
    """Dtype in which it is published."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    first: int
    """The first row."""
    rows: int

    @property
    def nbytes(self) -> int:
        """Size of the whole tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    @property
    def begin(self) -> int:
        """Place of the first row's first byte in the whole tensor."""
        return self.first * self._row

    @property
    def held(self) -> int:
        """Size of the rows."""
        return self.rows * self._row

    @property
    def _row(self) -> int:
        return torch.Size(self.shape[1:]).numel() * self.dtype.itemsize

    @torch.no_grad()
    def copied(self, block: torch.Tensor, place: int) -> list[int]:
        """Copy the rows to a place of a block; return the first one, their number, and their checksum."""
        there = block[place : place + self.held]
        values = _values(self.given, self.first, self.rows)
        if values.device != block.device:  # otherwise the host would convert the copied values
            values = values.to(self.dtype)
        if self.rows:
            cast_weights(values, there.view(self.dtype).view(self.rows, *self.shape[1:]))
        return [self.first, self.rows, checksum(there, self.begin, self.nbytes)]


def _share(
    name: str, given: torch.Tensor | LowRankSum, dtype: torch.dtype | None, ranks: Publishers
) -> _Share:
    tensor = given.base if isinstance(given, LowRankSum) else given
    shape = tuple(tensor.shape)
    first, rows = 0, shape[0] if shape else 1
    if _is_divided(tensor):  # as torch shards it, and as in ``_values``
        most = -(-rows // ranks.size)
        first = min(rows, most * ranks.rank)
        rows = min(most, rows - first)
    elif ranks.rank:  # all hold the same values, and one is enough
        rows = 0
    cast = tensor.is_floating_point() and not isinstance(tensor, torch.nn.Buffer)
    return _Share(name, given, dtype if dtype and cast else tensor.dtype, shape, first, rows)


def _values(given: torch.Tensor | LowRankSum, first: int, rows: int) -> torch.Tensor:
    """Return rows of a tensor that this process holds or computes.

    All ranks must call this: the factors of a sum, which are small, are gathered.
    """
    if isinstance(given, LowRankSum):
        if not _is_divided(given.base):
            return given.computed()
        left, right = whole(given.left), whole(given.right)
        return LowRankSum(_values(given.base, first, rows), left[first : first + rows], right).computed()
    part: Any = given.detach()
    if not _is_divided(part):
        return cast(torch.Tensor, part)
    if not part.placements[0].is_shard(0):  # a transposed adapter
        from torch.distributed.tensor import Shard

        part = part.redistribute(placements=[Shard(0)])
    local: torch.Tensor = part.to_local()
    if len(local) != rows:
        shape = tuple(part.shape)
        raise WeightSyncError(f"a rank holds {len(local)} rows of a tensor {shape}, expected {rows}")
    return local


def _is_divided(tensor: Any) -> bool:
    """Whether a tensor is a DTensor, whose parts the ranks hold; importing the class takes long."""
    return hasattr(tensor, "full_tensor")


def _described(
    shares: Sequence[_Share], offsets: Sequence[int], copied: Sequence[Sequence[Sequence[int]]]
) -> tuple[TensorInfo, ...]:
    """Describe the tensors in the block, from the rows that each rank has copied."""
    infos = []
    for number, (share, offset) in enumerate(zip(shares, offsets, strict=True)):
        found = [(rank, *of_rank[number]) for rank, of_rank in enumerate(copied)]
        parts = tuple(
            TensorPart(rank=rank, first=first, rows=rows, checksum=total)
            for rank, first, rows, total in found
            if rows
        )
        info = TensorInfo(
            name=share.name,
            dtype=str(share.dtype).removeprefix("torch."),
            shape=share.shape,
            offset=offset,
            checksum=sum(total for *_, total in found) % 2**64,
            parts=parts if len(copied) > 1 else (),
        )
        infos.append(info)
    return tuple(infos)
