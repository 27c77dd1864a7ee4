"""Weights in GPU memory, shared between the processes of a machine by a CUDA IPC handle.

The handle is plain data (JSON, not pickle).  A process that opens it reads the trainer's block directly; the
trainer's GPU must be visible to it.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from grpo_core import Weights, WeightSyncError
from grpo_core.kit import SharedMemoryWriter
from grpo_core.weights import layout, publishing

if TYPE_CHECKING:
    from grpo_core import TrainerSetup

SCHEME = "cuda_ipc:"
_BYTES = ("handle", "counter", "event")
_HANDLE = ("device", "handle", "size", "offset", "counter", "counter_offset", "event", "must_wait")
"""Fields that ``torch.UntypedStorage._share_cuda_`` returns and ``_new_shared_cuda`` takes, in order."""


class CudaIpcWriter:
    """Owns a block of GPU memory; each ``write`` replaces its contents.

    Args:
        device: device of this process.
        ranks: the ranks that write together; None for a single process.  The block is on the first rank's
            GPU; the others open it and write their rows.
    """

    def __init__(self, device: torch.device, ranks: publishing.Publishers | None = None) -> None:
        self._device, self._ranks = device, ranks or publishing.ALONE
        self._block: torch.Tensor | None = None
        self._location = ""

    def write(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor | layout.LowRankSum]],
        *,
        dtype: torch.dtype | None = None,
    ) -> Weights:
        """Copy the tensors into the block; the copies are complete when this returns.

        Raises WeightSyncError if a rank cannot open the block.
        """
        weights = publishing.pack(
            version,
            tensors,
            block=self._memory,
            location=lambda: self._location,
            dtype=dtype,
            ranks=self._ranks,
        )
        torch.cuda.synchronize(self._device)
        return weights

    def _memory(self, nbytes: int) -> torch.Tensor:
        if self._ranks.rank == 0 and (self._block is None or self._block.numel() < nbytes):
            self._block = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            handle = self._block.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
            uuid = str(torch.cuda.get_device_properties(self._device).uuid)
            self._location = described(uuid, handle)
        location = self._ranks.gathered(self._location)[0]
        if self._block is None or location != self._location:
            try:
                self._block, self._location = _open(location), location
            except (RuntimeError, ValueError) as error:
                raise WeightSyncError(
                    f"rank {self._ranks.rank} of the trainer cannot open the block of rank 0 ({error}); use "
                    'engine.transport = "shm"'
                ) from None
        return self._block


def writer(setup: TrainerSetup, device: torch.device, ranks: publishing.Publishers) -> publishing.Writer:
    """Return the writer of a trainer's rank; a trainer on the CPU writes shared memory."""
    return CudaIpcWriter(device, ranks) if device.type == "cuda" else SharedMemoryWriter(ranks)


def described(uuid: str, handle: Iterable[Any]) -> str:
    """Encode a handle as a location, with the UUID of the device, since indices differ between processes."""
    fields = dict(zip(_HANDLE, handle, strict=True))
    fields |= {name: base64.b64encode(fields[name]).decode() for name in _BYTES}
    return SCHEME + json.dumps(fields | {"device": uuid})


def handle_of(location: str, uuids: Iterable[str]) -> list[Any]:
    """Decode a location, with this process's index of the device.  Raises ValueError if it is not visible."""
    fields = json.loads(location.removeprefix(SCHEME))
    here = list(uuids)
    if fields["device"] not in here:
        raise ValueError(f"the trainer's GPU {fields['device']} is not one of {here}")
    fields |= {name: base64.b64decode(fields[name]) for name in _BYTES}
    fields["device"] = here.index(fields["device"])
    return [fields[name] for name in _HANDLE]


_opened: dict[str, torch.Tensor] = {}
"""The last opened block."""


def read(weights: Weights, device: torch.device | None = None) -> torch.Tensor:
    """Open the trainer's block, uint8 [n >= nbytes].  Raises WeightSyncError on failure."""
    if weights.location not in _opened:
        _opened.clear()
        try:
            _opened[weights.location] = _open(weights.location)
        except (RuntimeError, ValueError) as error:
            raise WeightSyncError(
                f"version {weights.version}: the trainer's GPU memory cannot be opened here ({error}); both "
                'must see the same GPU of one machine, or use engine.transport = "shm"'
            ) from None
    return _opened[weights.location]


def _open(location: str) -> torch.Tensor:
    """Open a block of another process.  Raises RuntimeError, or ValueError if its GPU is not visible."""
    count = torch.cuda.device_count()
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(count)]
    number, *handle = handle_of(location, uuids)
    storage = torch.UntypedStorage._new_shared_cuda(number, *handle)
    return torch.empty(0, dtype=torch.uint8, device=torch.device("cuda", number)).set_(storage)
