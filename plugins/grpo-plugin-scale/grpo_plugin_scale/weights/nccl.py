"""Moving a block between the GPUs of a trainer and an engine, by NCCL in a group of these two.

NCCL waits for ever for a partner that has gone, and by default torch watches a group with threads that end
the whole process when something fails.  Here a group has no such threads, its communicator is made when the
two meet, and each wait ends when the partner closes the connection, or after a time limit.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from grpo_plugin_scale.weights.line import Line

_dist: Any = torch.distributed
"""``torch.distributed``, untyped: its contents depend on how torch was built."""

TRAINER, ENGINE = 0, 1
"""Ranks of the two members of a group."""
SECONDS = 300.0
"""Seconds in which a block has to arrive."""
MEETING = 60.0
"""Seconds in which NCCL has to make a communicator."""
POLL = 0.001
"""Seconds between two looks at a transfer."""
MAX_CTAS = 4
"""Thread blocks that NCCL may use for a transfer.  An engine of several GPUs runs all-reduces at the same
time, and two communicators can wait for each other for ever if their kernels do not fit on a GPU together.
Few are enough to use a link between two GPUs."""


def device_id(device: torch.device) -> str | None:
    """Return the UUID of a GPU that NCCL can use, None for any other device."""
    if device.type != "cuda" or not _dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def memory_setting() -> str:
    """Return how NCCL takes memory in this process: NCCL_CUMEM_ENABLE, or "" for NCCL's own choice.

    NCCL cannot connect two processes of one machine that differ in this (NovaSky-AI/SkyRL#143,
    NVIDIA-NeMo/RL#564), and its own error does not name the reason.
    """
    return os.environ.get("NCCL_CUMEM_ENABLE", "")


class Pair:
    """A group of the trainer and one engine, independent of every other group of the process.

    Args:
        line: their connection; the addresses of the group travel over it.
        rank: of this end.

    Raises RuntimeError if NCCL cannot connect the two, OSError if the partner goes.
    """

    def __init__(self, line: Line, rank: int, device: torch.device) -> None:
        self._line, self._rank, self._device = line, rank, device
        self._group = _group(line, rank)
        # torch makes the communicator at the first transfer: here, where nobody waits for the weights yet
        self.move(torch.zeros(1, dtype=torch.uint8, device=device))

    def move(self, block: torch.Tensor) -> None:
        """Send a block as the trainer, or fill it as the engine; it has been moved when this returns.

        Raises OSError if the partner goes or is too slow, RuntimeError for an error of NCCL.  The group is
        aborted then.
        """
        try:
            with aside(self._device):
                if self._rank == TRAINER:
                    work = self._group.send([block], ENGINE, 0)
                else:
                    work = self._group.recv([block], TRAINER, 0)
                self._wait(work)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """End what the group does on the GPU, and free its memory there."""
        with contextlib.suppress(RuntimeError):  # the reason for the abort says more
            self._group.abort()

    def _wait(self, work: Any) -> None:
        end = time.monotonic() + SECONDS
        while not work.is_completed():
            if self._line.hung_up(POLL):
                raise ConnectionError("the connection ended in the middle of a transfer by NCCL")
            if time.monotonic() > end:
                raise TimeoutError(f"a transfer by NCCL took longer than {SECONDS:g} s")
        work.wait()  # it is complete; an error of NCCL is raised here
        settle(self._device)


def aside(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Use a separate CUDA stream on a GPU, so that a transfer does not wait for training or decoding."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def settle(device: torch.device) -> None:
    """Wait until a GPU has finished what this thread started there."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _group(line: Line, rank: int) -> Any:
    chosen = _dist.ProcessGroupNCCL.Options()
    chosen._timeout = timedelta(seconds=SECONDS)
    chosen.config.blocking = 0  # otherwise NCCL waits without a limit for a partner that does not come
    chosen.config.max_ctas = MAX_CTAS
    with _constructing, _watched_by_nobody():
        return _dist.ProcessGroupNCCL(_store(line), rank, 2, chosen)


_constructing = threading.Lock()
"""Held while environment variables are changed, which all threads see."""


@contextlib.contextmanager
def _watched_by_nobody() -> Iterator[None]:
    """Let groups be constructed without threads that watch them; torch reads this from the environment only.

    TORCH_NCCL_NONBLOCKING_TIMEOUT stays: torch reads it once, when the first communicator is made.
    """
    os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", f"{MEETING:.0f}")
    before = os.environ.get("TORCH_NCCL_BLOCKING_WAIT")
    os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"
    try:
        yield
    finally:
        del os.environ["TORCH_NCCL_BLOCKING_WAIT"]
        if before is not None:
            os.environ["TORCH_NCCL_BLOCKING_WAIT"] = before


def _store(line: Line) -> Any:
    """Make the store in which the two of a group find each other; its keys travel over their connection."""

    class LineStore(_dist.Store):  # type: ignore[misc]
        def set(self, key: str, value: bytes) -> None:
            line.keys[key] = bytes(value)
            line.send({"key": key, "value": bytes(value).hex()})

        def get(self, key: str) -> bytes:
            return line.receive_key(key)

        def check(self, keys: list[str]) -> bool:
            return all(key in line.keys for key in keys)

        def wait(self, keys: list[str], timeout: Any = None) -> None:
            for key in keys:
                line.receive_key(key)

    return LineStore()
