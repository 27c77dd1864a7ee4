"""A trainer and engines of the transport ``collective`` in processes of their own, which tests stop and kill.

An end can be told to halt at a moment of a transfer: it says so, and waits until it is told to go on.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading

import fake_gpus
import torch

from grpo_core.contracts.errors import WeightSyncError
from grpo_core.weights.reading import read_weights
from grpo_plugin_scale.weights import collective, nccl
from grpo_plugin_scale.weights.collective import CollectiveWriter
from grpo_plugin_scale.weights.line import Line
from grpo_plugin_scale.weights.nccl import Pair

CPU = torch.device("cpu")
PATIENCE, RELEASE, SECONDS = 0.3, 1.0, 2.0
"""Time limits of a trainer (the first two) and of an engine, in seconds; see ``collective``."""
HEARS = 60.0
"""Seconds after which a test gives up on a process."""
SIZE = 48 << 20
"""Bytes of a block: the buffers of a connection hold less than the part that follows a halt."""

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["grpo_core.weights.reading"])  # each process would import torch anew


class End:
    """A process and the pipe to it.

    Args:
        gpu: UUID of a GPU for which ``fake_gpus`` stands in, or "cuda:0" for a real one; None is the CPU.
    """

    def __init__(self, what, gpu=None):
        self.gpu = gpu
        self._pipe, there = _processes.Pipe()
        self._process = _processes.Process(target=what, args=(there, gpu), daemon=True)
        self._process.start()
        there.close()

    def tell(self, *message):
        self._pipe.send(message)

    def hear(self):
        """Return what it says.  Raises TimeoutError if it says nothing, EOFError if it has ended."""
        if not self._pipe.poll(HEARS):
            raise TimeoutError("it says nothing")
        return self._pipe.recv()

    def signal(self, number):
        os.kill(self._process.pid, number)

    def kill(self):
        self._process.kill()
        self._process.join(HEARS)
        self._pipe.close()


class Trainer(End):
    def __init__(self, gpu=None):
        super().__init__(_trainer, gpu)

    @classmethod
    def whose_aborts_hang(cls, gpu):
        made = cls.__new__(cls)
        End.__init__(made, _trainer_whose_aborts_hang, gpu)
        return made

    def write(self, version, halt=""):
        """Publish; return the weights.  ``halt``: a moment, "before" or "during", of the first transfer."""
        self.tell(version, halt)
        return self.hear()


class Engine(End):
    def __init__(self, gpu=None):
        super().__init__(_engine, gpu)

    def read(self, weights, halt=""):
        """Receive weights; return the version that is in the block, or a WeightSyncError."""
        self.tell(weights, halt)
        return self.hear()


@contextlib.contextmanager
def ends(*kinds):
    """Start ends, and kill them in the end.  ``kinds``: pairs of a class and a GPU's UUID or None."""
    with contextlib.ExitStack() as stack:
        made = []
        for kind, gpu in kinds:
            made.append(kind(gpu))
            stack.callback(made[-1].kill)
        yield made


class _Halt:
    """The moment at which this process halts next."""

    def __init__(self, pipe, *, for_ever=False):
        self._pipe, self._for_ever, self.moment = pipe, for_ever, ""

    def at(self, moment):
        if self.moment == moment:
            self.moment = ""
            self._pipe.send(moment)
            if self._for_ever:
                threading.Event().wait()
            self._pipe.recv()

    def before(self, owner, name, moment, when=lambda *arguments: True):
        """Halt before a method is called."""
        real = getattr(owner, name)

        def method(*arguments):
            if when(*arguments):
                self.at(moment)
            return real(*arguments)

        setattr(owner, name, method)

    def amid(self, name):
        """Halt when a part of a block has been moved over a connection."""
        real = getattr(Line, name)

        def method(line, block):
            real(line, block[: SIZE // 16])
            self.at("during")
            real(line, block[SIZE // 16 :])

        setattr(Line, name, method)

    def amid_nccl(self):
        self.before(Pair, "__init__", "meeting")
        self.before(Pair, "move", "during", lambda pair, block: block.numel() > 1)


def _prepare(gpu):
    collective.PATIENCE, collective.RELEASE = PATIENCE, RELEASE
    if gpu is None:
        return CPU
    if gpu.startswith("cuda"):
        return torch.device(gpu)
    fake_gpus.install(gpu)
    return fake_gpus.GPU


def _trainer(pipe, gpu):
    device = _prepare(gpu)
    writer = CollectiveWriter(device, "127.0.0.1")
    halt = _Halt(pipe, for_ever=True)  # the pipe is read by the thread that writes
    halt.before(CollectiveWriter, "_answer", "before")
    halt.amid("send_block")
    halt.amid_nccl()
    while True:
        version, halt.moment = pipe.recv()
        pipe.send(writer.write(version, [("a", torch.full((SIZE,), version, dtype=torch.uint8))]))


def _trainer_whose_aborts_hang(pipe, gpu):
    fake_gpus.ProcessGroup.abort_hangs = True
    _trainer(pipe, gpu)


def _engine(pipe, gpu):
    device = _prepare(gpu)
    real = gpu is not None and gpu.startswith("cuda")  # CUDA and NCCL take their time to start
    collective.SECONDS = nccl.SECONDS = collective.MEETING = 10 * SECONDS if real else SECONDS
    halt = _Halt(pipe)
    halt.before(collective._Partner, "_send", "before", lambda partner, message: "publication" in message)
    halt.amid("receive_block")
    halt.amid_nccl()
    while True:
        weights, halt.moment = pipe.recv()
        try:
            block = read_weights(weights, device=device)["a"]
            pipe.send(int(block[0]) if block.eq(block[0]).all() else "parts of two versions")
        except WeightSyncError as error:
            pipe.send(error)
