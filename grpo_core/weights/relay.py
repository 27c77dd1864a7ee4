"""Weights that are sent: from the trainer's block to a block of each engine that asks for them.

Between GPUs by NCCL, else by gloo, over groups of two: an engine may come and go, and one that is slow keeps
only itself waiting.  An engine asks for a version by number, and the trainer refuses any but the one that it
holds; it writes no other while it sends one.  So what arrives is one version, whole, and the one asked for.

The location names the trainer's socket, and a secret without which it tells nothing.  Who has it reads the
weights: bind it to addresses of a network that is trusted.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from grpo_core.errors import WeightSyncError
from grpo_core.records import Weights
from grpo_core.weights.layout import pack

SCHEME = "relay:"
SECONDS = 300.0
"""Patience with a partner in the middle of a transfer."""
_TRAINER, _ENGINE = 0, 1
"""Ranks in a group."""


class RelayWriter:
    """Owns the block that one trainer publishes in, and sends it to whoever asks.

    Args:
        device: of the block.
        host: address of the sockets, at which engines reach them.
    """

    def __init__(self, device: torch.device, host: str) -> None:
        self._device, self._host = device, host
        self._block = torch.empty(0, dtype=torch.uint8, device=device)
        self._version: int | None = None
        self._sending = threading.Lock()
        self._secret = secrets.token_hex(16)
        self._store: dist.Store | None = None
        self._partners = 0
        self._socket = socket.create_server((host, 0), family=_family(host))
        threading.Thread(target=self._accept, name="relay", daemon=True).start()

    def write(self, version: int, tensors: Iterable[tuple[str, torch.Tensor]]) -> Weights:
        """Copy the tensors there, when nobody is being sent what was there before."""
        port = self._socket.getsockname()[1]
        location = f"{SCHEME}{json.dumps([self._host, port, self._secret])}"
        with self._sending:
            self._version = None
            weights = pack(version, tensors, block=self._memory, location=lambda: location)
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
            threading.Thread(target=self._serve, args=(connection,), name="relay", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """One engine, until it goes away."""
        connection.settimeout(None)  # it asks again when there is another version
        group: dist.ProcessGroup | None = None
        with connection, connection.makefile("rwb") as lines:
            try:
                while asked := _receive(lines):
                    if not hmac.compare_digest(str(asked["secret"]), self._secret):
                        return
                    with self._sending:
                        if asked["version"] != self._version:
                            _send(lines, {"problem": f"the trainer holds version {self._version} now"})
                            continue
                        if group is None:
                            group = self._meet(lines, cuda=asked["cuda"])
                        else:
                            _send(lines, {})
                        group.send([self._block], _ENGINE, 0).wait(timedelta(seconds=SECONDS))
                        _settle(self._block)
            except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
                print(f"relay: an engine has gone: {error}", flush=True)

    def _meet(self, lines: BinaryIO, *, cuda: bool) -> dist.ProcessGroup:
        if self._store is None:
            listening = socket.create_server((self._host, 0), family=_family(self._host))
            self._store_port = listening.getsockname()[1]
            self._store = dist.TCPStore(
                self._host,
                self._store_port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
        self._partners += 1
        name = f"partner {self._partners}"
        cuda = cuda and self._device.type == "cuda"
        _send(lines, {"store": self._store_port, "name": name, "cuda": cuda})
        return _group(dist.PrefixStore(name, self._store), _TRAINER, cuda=cuda, host=self._host)


class _Line:
    """An engine's end: connected to one trainer, and the last version that it sent."""

    def __init__(self, location: str) -> None:
        self._host, port, self._secret = json.loads(location.removeprefix(SCHEME))
        self._socket = socket.create_connection((self._host, port), timeout=SECONDS)
        self._lines = self._socket.makefile("rwb")
        self._group: dist.ProcessGroup | None = None
        self._block = torch.empty(0, dtype=torch.uint8)
        self._version: int | None = None

    def pull(self, version: int, nbytes: int) -> torch.Tensor:
        if self._version == version:
            return self._block
        self._version = None
        _send(
            self._lines, {"secret": self._secret, "version": version, "cuda": torch.cuda.is_available()}
        )
        answer = _receive(self._lines)
        if answer is None:
            raise ConnectionError("the trainer has hung up")
        if "problem" in answer:
            raise ValueError(answer["problem"])
        if self._group is None:
            store = dist.TCPStore(self._host, answer["store"], is_master=False)
            named = dist.PrefixStore(answer["name"], store)
            device = torch.device("cuda", torch.cuda.current_device()) if answer["cuda"] else "cpu"
            self._block = torch.empty(0, dtype=torch.uint8, device=device)
            self._group = _group(named, _ENGINE, cuda=answer["cuda"], host=self._socket.getsockname()[0])
        if self._block.numel() != nbytes:
            self._block = torch.empty(nbytes, dtype=torch.uint8, device=self._block.device)
        self._group.recv([self._block], _TRAINER, 0).wait(timedelta(seconds=SECONDS))
        _settle(self._block)
        self._version = version
        return self._block

    def close(self) -> None:
        self._lines.close()
        self._socket.close()


_lines: dict[str, _Line] = {}
"""To the last trainer."""


def pulled(weights: Weights) -> torch.Tensor:
    """A copy of the trainer's block, uint8 [nbytes]; the last one is overwritten, unless it is this version.

    Raises WeightSyncError if the trainer cannot be reached, or holds another version by now.
    """
    try:
        if weights.location not in _lines:
            _hang_up()
            _lines[weights.location] = _Line(weights.location)
        return _lines[weights.location].pull(weights.version, weights.nbytes)
    except (OSError, RuntimeError, ValueError) as error:
        _hang_up()
        raise WeightSyncError(
            f"version {weights.version} did not arrive from the trainer: {error} (engine.transport is "
            '"relay"; engine.relay_host must be an address at which engines reach the trainer)'
        ) from None


def _hang_up() -> None:
    while _lines:
        _lines.popitem()[1].close()


def _group(store: dist.Store, rank: int, *, cuda: bool, host: str) -> dist.ProcessGroup:
    """Of two, beside whatever default group a process has."""
    if cuda:
        chosen = dist.ProcessGroupNCCL.Options()
        chosen._timeout = timedelta(seconds=SECONDS)
        return dist.ProcessGroupNCCL(store, rank, 2, chosen)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=SECONDS)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    return dist.ProcessGroupGloo(store, rank, 2, options)


def _settle(block: torch.Tensor) -> None:
    """What a GPU was asked to do with it is done when this returns."""
    if block.is_cuda:
        torch.cuda.synchronize(block.device)


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host, None)[0][0]


def _send(lines: BinaryIO, message: dict[str, Any]) -> None:
    lines.write(json.dumps(message).encode() + b"\n")
    lines.flush()


def _receive(lines: BinaryIO) -> dict[str, Any] | None:
    """None if the other end has hung up."""
    line = lines.readline()
    return json.loads(line) if line else None
