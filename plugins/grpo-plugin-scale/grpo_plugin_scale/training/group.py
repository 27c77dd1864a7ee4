"""Ranks connected by torch.distributed: NCCL between GPUs, gloo between CPUs."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TypeVar
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, HashStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor

from grpo_core.processes import cpu

T = TypeVar("T")


class Group:
    """The ``Ranks`` of several processes.

    Args:
        rank: number of this process, from 0.
        size: number of processes.
        rendezvous: a file, which must not exist before the first rank starts, or ``tcp://address:port`` of
            the first rank.  A single process needs none.
        device: device of this process.
        seconds: time limit of each exchange.
        leaves: whether other groups of this process use NCCL between machines; NCCL chooses network
            interfaces once for all groups.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        rendezvous: str,
        device: torch.device,
        seconds: float,
        leaves: bool = False,
    ) -> None:
        self.rank, self.size, self._device = rank, size, device
        # by default they listen on the address of the host name
        for library in ("GLOO",) if leaves else ("GLOO", "NCCL"):
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        if device.type == "cuda" and device.index is not None:
            torch.cuda.set_device(device)  # NCCL creates communicators on the current device
        if not dist.is_initialized():  # a process initialises torch.distributed once
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
                store=_store(rendezvous, rank, size, timedelta(seconds=seconds)) if size > 1 else HashStore(),
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=seconds),
            )
        self.mesh = DeviceMesh(device.type, torch.arange(size))

    def gathered(self, value: T) -> list[T]:
        said = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        return [json.loads(bytes(part.tolist())) for part in self._parts(said)]  # no pickle from a socket

    def joined(self, values: Tensor) -> Tensor:
        return torch.cat(self._parts(values))

    def _parts(self, values: Tensor) -> list[Tensor]:
        """Return the values [N] of each rank; N may differ."""
        sizes = [torch.zeros(1, dtype=torch.int64, device=values.device) for _ in range(self.size)]
        dist.all_gather(sizes, torch.full_like(sizes[0], len(values)))
        counts = [int(size) for size in sizes]
        padded = values.new_zeros(max(counts))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded)
        return [part[:count] for part, count in zip(parts, counts, strict=True)]

    def in_turn(self, make: Callable[[], T]) -> T:
        failed: Exception | None = None
        for turn in range(self.size):
            if turn == self.rank:
                try:
                    made = make()
                except Exception as error:  # raise after the collective, so that no rank waits for this one
                    failed = error
                cpu.return_freed_memory()  # or each rank would keep memory that only one needs at a time
            dist.barrier()
        if failed is not None:
            raise failed
        return made

    def dealt(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        owners, mine = self.owners(tensors), {}
        for name, tensor in tensors.items():
            whole = self.whole(tensor)
            if owners[name] == self.rank:
                mine[name] = whole
        return mine

    def whole(self, tensor: Tensor) -> Tensor:
        """Gather a sharded tensor; a collective call."""
        whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        return whole.detach()

    def owners(self, tensors: Mapping[str, Tensor]) -> dict[str, int]:
        """Assign each tensor to the rank that saves it, with balanced sizes."""
        owners, numbers = {}, [0] * self.size
        for name in sorted(tensors, key=lambda name: (-tensors[name].numel(), name)):
            owners[name] = least = numbers.index(min(numbers))
            numbers[least] += tensors[name].numel()
        return owners

    @torch.no_grad()
    def part(self, value: Tensor, like: Tensor) -> Tensor:
        if not isinstance(like, DTensor) or value.shape != like.shape:
            return value
        return distribute_tensor(
            value.to(self._device), like.device_mesh, like.placements, src_data_rank=None
        )


def _store(rendezvous: str, rank: int, size: int, wait: timedelta) -> Store:
    """Return the store for the rendezvous of ranks.  Raises OSError if the port is in use."""
    if not rendezvous.startswith("tcp://"):
        return FileStore(rendezvous, size)
    where = urlsplit(rendezvous)
    host, port = where.hostname or "", where.port or 0
    if rank > 0:
        return TCPStore(host, port, size, False, wait)
    family = socket.getaddrinfo(host, None)[0][0]
    listening = socket.create_server((host, port), family=family)  # torch would listen on all addresses
    return TCPStore(host, port, size, True, wait, False, master_listen_fd=listening.detach())
