"""A copy of tensors that is written to disk while the originals change.

Training waits only for the copy.  Its memory is kept from one checkpoint to the next: touching new pages
takes several times as long as copying into them.  It is one block, which is pinned as a whole for GPUs.  So a
snapshot costs as much host memory as the tensors that it copies.  Without it, ``save`` waits for the disk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from grpo_core.training.host_block import room_for

Write = Callable[[Mapping[str, Tensor]], None]


class Snapshot:
    """One copy, and one thread that writes it.

    Args:
        copies: whether to copy; if not, ``save`` returns when everything is written.
    """

    def __init__(self, *, copies: bool = True) -> None:
        self._copies = copies
        self._memory: dict[str, Tensor] = {}
        self._layout: list[tuple[object, ...]] = []
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._written: Future[None] | None = None

    def save(self, tensors: Mapping[str, Tensor], write: Write) -> None:
        """Copy the tensors; ``write`` gets the copies, on the CPU, under the same names, in the thread.

        Several names of one tensor share one copy.  The previous copy has to be written first.
        """
        if self._written is not None:
            self._written.exception()  # already raised to the caller that waited for ``written``
        given = self._copy(tensors) if self._copies else dict(tensors)
        self._written = self._thread.submit(write, given)
        if not self._copies:
            self._written.exception()

    def written(self) -> Future[None]:
        """Return the future of the last ``save``: done when all is written, with the error of ``write``."""
        assert self._written is not None, "nothing was saved"
        return self._written

    @torch.no_grad()
    def _copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        first: dict[tuple[int, torch.Size], str] = {}
        names, once = {}, {}
        for name, tensor in tensors.items():
            twin = first.setdefault((tensor.data_ptr(), tensor.shape), name) if tensor.numel() else name
            names[name] = twin
            once[twin] = tensors[twin]
        gpus = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        layout: list[tuple[object, ...]] = [(name, t.shape, t.dtype, t.stride()) for name, t in once.items()]
        if layout != self._layout:  # the tensors have changed
            self._memory.clear()  # before more is allocated
            self._memory = dict(zip(once, room_for(list(once.values()), pinned=bool(gpus)), strict=True))
            self._layout = layout
        for name, tensor in once.items():
            self._memory[name].copy_(tensor, non_blocking=True)
        for gpu in gpus:  # each by name: it need not be the current one
            torch.cuda.synchronize(gpu)
        return {name: self._memory[twin] for name, twin in names.items()}
