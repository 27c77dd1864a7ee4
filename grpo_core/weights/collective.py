"""Weights sent by a collective backend, from the trainer's block to a block of each engine that asks.

The backend is NCCL between GPUs and gloo otherwise, over groups of two, so that engines can come and go and a
slow engine keeps only itself waiting.  An engine asks for a publication by number.  The trainer refuses any
number but the last, and writes no other while it sends one, so an engine gets one whole version.

The location contains the address of the trainer's socket and a secret.  Whoever has the secret can read the
weights, so bind the socket to a trusted network only.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import secrets
import socket
import threading
from collections.abc import Iterable
from datetime import timedelta
from io import BufferedRWPair
from typing import Any

import torch
import torch.distributed

from grpo_core.errors import WeightSyncError
from grpo_core.records import Weights
from grpo_core.weights import COLLECTIVE
from grpo_core.weights.layout import pack

_dist: Any = torch.distributed
"""``torch.distributed``, untyped: its contents depend on how torch was built."""

SECONDS = 300.0
"""Seconds to wait for a partner in the middle of a transfer."""
LONGEST = 1000
"""Largest size of a message in bytes."""
_TRAINER, _ENGINE = 0, 1
"""Ranks of the two members of a group."""


class CollectiveWriter:
    """Owns the block that one trainer publishes in, and sends it to engines.

    Args:
        device: device of the block.
        host: address of the sockets at which engines reach the trainer.
    """

    def __init__(self, device: torch.device, host: str) -> None:
        self._device, self._host = device, host
        self._block = torch.empty(0, dtype=torch.uint8, device=device)
        self._publication = 0
        self._version: int | None = None
        """Version of the block's contents; None while they are written."""
        self._sending = threading.Lock()
        self._secret = secrets.token_hex(16)
        self._partners = itertools.count(1)
        self._store, self._store_port = _serving_store(host)
        self._socket = socket.create_server((host, 0), family=_family(host))
        threading.Thread(target=self._accept, name="collective", daemon=True).start()

    def write(
        self,
        version: int,
        tensors: Iterable[tuple[str, torch.Tensor]],
        *,
        dtype: torch.dtype | None = None,
    ) -> Weights:
        """Copy the tensors into the block, after all running transfers of the version before."""
        port = self._socket.getsockname()[1]
        with self._sending:
            self._version = None
            self._publication += 1
            location = f"{COLLECTIVE}{json.dumps([self._host, port, self._secret, self._publication])}"
            weights = pack(version, tensors, block=self._memory, location=lambda: location, dtype=dtype)
            _settle(self._block)
            self._version = version
        return weights

    def _memory(self, nbytes: int) -> torch.Tensor:
        if self._block.numel() != nbytes:
            self._block = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return self._block

    def _accept(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            threading.Thread(target=self._serve, args=(connection,), name="collective", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve one engine until it closes the connection."""
        with connection, connection.makefile("rwb") as lines, _aside(self._device):
            try:
                hello = _receive(lines)
                if hello is None or not hmac.compare_digest(str(hello["secret"]), self._secret):
                    return
                group = self._meet(lines, cuda=hello["cuda"] and self._device.type == "cuda")
                while asked := _receive(lines):
                    self._answer(lines, group, asked["publication"])
            except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
                print(f"collective: an engine has gone: {error}", flush=True)

    def _meet(self, lines: BufferedRWPair, *, cuda: bool) -> Any:
        name = f"partner {next(self._partners)}"
        _send(lines, {"store": self._store_port, "name": name, "cuda": cuda})
        return _group(_dist.PrefixStore(name, self._store), _TRAINER, cuda=cuda, host=self._host)

    def _answer(self, lines: BufferedRWPair, group: Any, publication: int) -> None:
        with self._sending:
            if publication != self._publication or self._version is None:
                _send(lines, {"problem": f"the trainer holds version {self._version} now"})
                return
            _send(lines, {})
            group.send([self._block], _ENGINE, 0).wait(timedelta(seconds=SECONDS))
            _settle(self._block)


class _Line:
    """An engine's connection to one trainer, with the last block that it received."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        self._socket = socket.create_connection((host, port), timeout=SECONDS)
        self._lines = self._socket.makefile("rwb")
        answer = self._ask({"secret": secret, "cuda": torch.cuda.is_available()})
        store = _dist.PrefixStore(answer["name"], _dist.TCPStore(host, answer["store"], is_master=False))
        cuda = answer["cuda"]
        self._group = _group(store, _ENGINE, cuda=cuda, host=self._socket.getsockname()[0])
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu"
        self._block = torch.empty(0, dtype=torch.uint8, device=device)
        self._publication: int | None = None

    def pull(self, publication: int, nbytes: int) -> torch.Tensor:
        if self._publication == publication:
            return self._block
        self._publication = None
        answer = self._ask({"publication": publication})
        if "problem" in answer:
            raise ValueError(answer["problem"])
        if self._block.numel() != nbytes:
            self._block = torch.empty(nbytes, dtype=torch.uint8, device=self._block.device)
        with _aside(self._block.device):
            self._group.recv([self._block], _TRAINER, 0).wait(timedelta(seconds=SECONDS))
            _settle(self._block)
        self._publication = publication
        return self._block

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        _send(self._lines, message)
        answer = _receive(self._lines)
        if answer is None:
            raise ConnectionError("the trainer has hung up")
        return answer

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


_lines: dict[tuple[str, int, str], _Line] = {}
"""The connection to the last trainer."""


def pulled(weights: Weights) -> torch.Tensor:
    """Return a copy of the trainer's block, uint8 [nbytes]; it overwrites the copy of another version.

    Raises WeightSyncError if the trainer cannot be reached, or already holds another version.
    """
    try:
        host, port, secret, publication = json.loads(weights.location.removeprefix(COLLECTIVE))
        if (host, port, secret) not in _lines:
            _hang_up()
            _lines[host, port, secret] = _Line(host, port, secret)
        return _lines[host, port, secret].pull(publication, weights.nbytes)
    except (OSError, RuntimeError, ValueError) as error:
        _hang_up()
        raise WeightSyncError(
            f"version {weights.version} did not arrive from the trainer: {error} (engine.transport is "
            '"collective"; engine.collective_host must be an address at which engines reach the trainer)'
        ) from None


def _hang_up() -> None:
    while _lines:
        _lines.popitem()[1].close()


def _serving_store(host: str) -> tuple[Any, int]:
    """Make the store in which partners find each other's addresses; it listens on ``host`` only."""
    listening = socket.create_server((host, 0), family=_family(host))
    port = listening.getsockname()[1]
    store = _dist.TCPStore(
        host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )
    return store, port


def _group(store: Any, rank: int, *, cuda: bool, host: str) -> Any:
    """Make a group of two, independent of the default group of the process."""
    if cuda:
        chosen = _dist.ProcessGroupNCCL.Options()
        chosen._timeout = timedelta(seconds=SECONDS)
        return _dist.ProcessGroupNCCL(store, rank, 2, chosen)
    options = _dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=SECONDS)
    options._devices = [_dist.ProcessGroupGloo.create_device(hostname=host)]
    return _dist.ProcessGroupGloo(store, rank, 2, options)


def _aside(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Use a separate CUDA stream on a GPU, so that a transfer does not wait for training or decoding."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]


def _settle(block: torch.Tensor) -> None:
    """Wait until the GPU has finished what this thread started on its tensors."""
    if block.is_cuda:
        torch.cuda.current_stream(block.device).synchronize()


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None)[0][0]


def _send(lines: BufferedRWPair, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message).encode() + b"\n")
    lines.flush()


def _receive(lines: BufferedRWPair) -> dict[str, Any] | None:
    """Receive a message, or None if the other end has closed the connection."""
    line = lines.readline(LONGEST)
    return json.loads(line) if line else None
