"""Transfer of a block between the GPUs of a trainer and an engine, in an NCCL group of two.

NCCL waits forever for a partner that has died, and torch's watchdog threads abort the whole process on
errors.  Here a group has no watchdog, its communicator is created when the connection is established, and
each wait ends when the partner closes the connection, or after a time limit.
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
"""``torch.distributed``, untyped because its contents depend on torch's build."""

TRAINER, ENGINE = 0, 1
"""Ranks of the two members of a group."""
SECONDS = 300.0
"""Time limit in seconds for a transfer."""
MEETING = 60.0
"""Time limit in seconds for creating a communicator."""
POLL = 0.001
"""Polling interval of a transfer in seconds."""
MAX_CTAS = 4
"""Largest number of thread blocks of a transfer.  An engine with several GPUs runs all-reduces at the same
time, and two communicators can deadlock if their kernels do not fit on a GPU together.  A few blocks saturate
a link between two GPUs."""


def device_id(device: torch.device) -> str | None:
    """Return the UUID of a GPU with NCCL support, None for any other device."""
    if device.type != "cuda" or not _dist.is_nccl_available():
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def memory_setting() -> str:
    """Return NCCL_CUMEM_ENABLE, NCCL's allocation mode in this process; "" is NCCL's default.

    NCCL cannot connect two processes of a machine with different modes (NovaSky-AI/SkyRL#143,
    NVIDIA-NeMo/RL#564), and its error does not name the reason.
    """
    return os.environ.get("NCCL_CUMEM_ENABLE", "")


class Pair:
    """A group of the trainer and one engine, independent of other groups of the process.

    Args:
        line: connection of the two, which carries the group's addresses.
        rank: rank of this end.

    Raises RuntimeError if NCCL cannot connect, OSError if the partner disconnects.
    """

    def __init__(self, line: Line, rank: int, device: torch.device) -> None:
        self._line, self._rank, self._device = line, rank, device
        self._group = _group(line, rank)
        # torch creates the communicator at the first transfer; do it before weights are awaited
        self.move(torch.zeros(1, dtype=torch.uint8, device=device))

    def move(self, block: torch.Tensor) -> None:
        """Send a block as the trainer, or fill it as the engine; returns after completion.

        Raises OSError if the partner disconnects or is too slow, RuntimeError for an error of NCCL.  Both
        abort the group.
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
        """Abort the group's work on the GPU, and free its memory."""
        with contextlib.suppress(RuntimeError):  # the reason of the abort is more informative
            self._group.abort()

    def _wait(self, work: Any) -> None:
        end = time.monotonic() + SECONDS
        while not work.is_completed():
            if self._line.hung_up(POLL):
                raise ConnectionError("the connection ended in the middle of a transfer by NCCL")
            if time.monotonic() > end:
                raise TimeoutError(f"a transfer by NCCL took longer than {SECONDS:g} s")
        work.wait()  # complete; raises errors of NCCL
        settle(self._device)


def aside(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Use a separate CUDA stream, so that a transfer does not wait for training or decoding."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def settle(device: torch.device) -> None:
    """Wait for the GPU work of this thread."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _group(line: Line, rank: int) -> Any:
    chosen = _dist.ProcessGroupNCCL.Options()
    chosen._timeout = timedelta(seconds=SECONDS)
    chosen.config.blocking = 0  # otherwise NCCL waits forever for a missing partner
    chosen.config.max_ctas = MAX_CTAS
    with _constructing, _watched_by_nobody():
        return _dist.ProcessGroupNCCL(_store(line), rank, 2, chosen)


_constructing = threading.Lock()
"""Guards changes of environment variables, which affect all threads."""


@contextlib.contextmanager
def _watched_by_nobody() -> Iterator[None]:
    """Construct groups without torch's watchdog threads, which only environment variables disable.

    TORCH_NCCL_NONBLOCKING_TIMEOUT stays, because torch reads it once, for the first communicator.
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
    """Return the rendezvous store of a group, whose keys are sent over the connection."""

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
