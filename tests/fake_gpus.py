"""GPUs and NCCL for machines without them: the code for GPUs runs on the host's memory, between processes.

A group moves blocks over a socket whose address travels through its store, as NCCL's does.  Like NCCL it
never notices that its partner has gone, and a transfer waits until the group is aborted.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from types import SimpleNamespace

import torch
import torch.distributed

from grpo_plugin_scale.weights import collective, cuda_ipc, nccl

GPU = torch.device("cuda", 0)


def install(uuid, patch=setattr):
    """Let the transports of this process see one GPU."""
    patch(nccl, "_dist", Distributed)
    for module in (collective, cuda_ipc, nccl):
        patch(module, "torch", Torch(uuid))


class Torch:
    """``torch`` with GPUs whose tensors are in the host's memory."""

    def __init__(self, uuid):
        self.cuda = Cuda(uuid)

    def __getattr__(self, name):
        return getattr(torch, name)

    def empty(self, *shape, dtype, device=None):
        return torch.empty(*shape, dtype=dtype)

    def zeros(self, *shape, dtype, device=None):
        return torch.zeros(*shape, dtype=dtype)


class Cuda:
    def __init__(self, uuid):
        self._uuid = uuid
        self.streams = []

    def get_device_properties(self, device):
        return SimpleNamespace(uuid=self._uuid)

    def device_count(self):
        return 1

    def synchronize(self, device):
        assert device == GPU

    def Stream(self, device):  # noqa: N802 - torch's name
        assert device == GPU
        return SimpleNamespace(synchronize=lambda: None)

    @contextlib.contextmanager
    def stream(self, stream):
        self.streams.append(stream)
        try:
            yield
        finally:
            self.streams.remove(stream)

    def current_stream(self, device):
        assert device == GPU
        return self.streams[-1] if self.streams else SimpleNamespace(synchronize=lambda: None)


class Config:
    __slots__ = ("blocking", "max_ctas")  # those of torch that are used; another name is an error


class Options:
    __slots__ = ("_timeout", "config")

    def __init__(self):
        self.config = Config()


class ProcessGroup:
    """``torch.distributed.ProcessGroupNCCL``."""

    Options = Options
    groups: list[ProcessGroup] = []  # noqa: RUF012
    """All groups of this process."""
    meeting = 10.0
    """Seconds in which a communicator has to be made."""
    abort_hangs = False
    """Whether an abort never returns."""

    def __init__(self, store, rank, size, options):
        assert size == 2
        self.store, self.rank, self.options = store, rank, options
        self.blocking_wait = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
        self.nonblocking_timeout = os.environ.get("TORCH_NCCL_NONBLOCKING_TIMEOUT")
        self.aborted = threading.Event()
        self.moved: list[int] = []
        """Sizes of the blocks that were given to it."""
        self._socket: socket.socket | None = None
        self.groups.append(self)

    def send(self, tensors, rank, tag):
        (block,) = tensors
        assert (self.rank, rank) == (0, 1)
        self.moved.append(block.numel())
        end = self._connected()
        return Work(self, lambda: end.sendall(block.numpy().data))

    def recv(self, tensors, rank, tag):
        (block,) = tensors
        assert (self.rank, rank) == (1, 0)
        self.moved.append(block.numel())
        end = self._connected()
        return Work(self, lambda: receive(end, memoryview(block.numpy().data)))

    def abort(self):
        if self.abort_hangs:
            threading.Event().wait()
        self.aborted.set()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
            self._socket.close()

    def _connected(self):
        """Make the communicator, at the first transfer; only its time limit ends the wait for the partner."""
        if self._socket is None and self.rank == 0:
            with socket.create_server(("127.0.0.1", 0)) as listening:
                listening.settimeout(self.meeting)
                self.store.set("0:1", str(listening.getsockname()[1]).encode())
                try:
                    self._socket = listening.accept()[0]
                except TimeoutError:
                    raise RuntimeError("NCCL timed out in non-blocking wait") from None
        elif self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", int(self.store.get("0:1"))))
        return self._socket


class Work:
    def __init__(self, group, transfer):
        self._group, self._transfer, self._aborted = group, transfer, False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self):
        try:
            self._transfer()
        except OSError:
            self._group.aborted.wait()
            self._aborted = True

    def is_completed(self):
        return not self._thread.is_alive()

    def wait(self):
        assert self.is_completed()
        if self._aborted:
            raise RuntimeError("NCCL communicator was aborted")


def receive(end, data):
    begin = 0
    while begin < len(data):
        n = end.recv_into(data[begin:])
        if not n:
            raise ConnectionError
        begin += n


class Distributed:
    """The part of ``torch.distributed`` that is used."""

    Store = torch.distributed.Store
    ProcessGroupNCCL = ProcessGroup

    @staticmethod
    def is_nccl_available():
        return True
