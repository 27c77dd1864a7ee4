"""Weights sent from the trainer's block to a block of each engine that asks, by NCCL or by TCP.

    engine                              trainer (one socket)
                    <------ nonce
    proof, nonce    ------>                       HMAC-SHA256 by the secret of both nonces: each end knows
                    <------ proof                 that the other has it, and nobody learns it by listening
    publication     ------>
                    <------ yes or no, and the block

NCCL moves the block over groups of two, so that engines can come and go and a slow engine keeps only itself
waiting; its addresses travel over the proven connection.  An engine asks for a publication by number.  The
trainer refuses any number but the last, and writes no other while it sends one, so an engine gets one whole
version.

The location contains the address of the trainer's socket and a secret.  Whoever has the secret can read the
weights.  Nothing is encrypted, so bind the socket to a trusted network only.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable
from datetime import timedelta
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
PROOF_SECONDS = 10.0
"""Seconds in which a new connection has to prove that it has the secret."""
MOST_UNPROVEN = 64
"""Largest number of connections that have not proven it yet; one more closes the oldest."""
LONGEST = 1000
"""Largest size of a message in bytes."""
CHUNK = 64 << 20
"""Bytes of a block that are sent at once: each part has its own time limit."""
_TRAINER, _ENGINE = 0, 1
"""Ranks of the two members of a group."""


class CollectiveWriter:
    """Owns the block that one trainer publishes in, and sends it to engines.

    Args:
        device: device of the block.
        host: address of the socket at which engines reach the trainer.
    """

    def __init__(self, device: torch.device, host: str) -> None:
        self._device, self._host = device, host
        self._block = torch.empty(0, dtype=torch.uint8, device=device)
        self._publication = 0
        self._version: int | None = None
        """Version of the block's contents; None while they are written."""
        self._sending = threading.Lock()
        self._secret = secrets.token_hex(16)
        self._unproven: deque[socket.socket] = deque()
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
            try:
                connection, _ = self._socket.accept()
            except OSError as error:  # no file descriptor is left, for one: later there may be one
                print(f"collective: a connection could not be accepted: {error}", flush=True)
                time.sleep(1.0)
                continue
            self._unproven.append(connection)
            if len(self._unproven) > MOST_UNPROVEN:
                _shut(self._unproven.popleft())
            threading.Thread(target=self._serve, args=(connection,), name="collective", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        """Serve one engine until it closes the connection."""
        with contextlib.closing(_Line(connection)) as line, _aside(self._device):
            try:
                group = self._meet(line)
                while asked := line.receive():
                    self._answer(line, group, asked["publication"])
            except PermissionError:
                pass  # a stranger, which is none of the user's engines
            except (OSError, RuntimeError, ValueError, KeyError, TypeError) as error:
                print(f"collective: an engine has gone: {error}", flush=True)
            finally:
                self._forget(connection)

    def _meet(self, line: _Line) -> Any:
        """Return the group of NCCL with a proven engine, or None without NCCL; raises PermissionError."""
        line.limit(PROOF_SECONDS)
        nonce = secrets.token_hex(16)
        try:
            line.send({"nonce": nonce})
            hello = line.receive() or {}
            known = hmac.compare_digest(str(hello["proof"]), _proof(self._secret, "engine", nonce))
        except (OSError, ValueError, TypeError, KeyError, RecursionError):
            raise PermissionError from None
        if not known:
            raise PermissionError
        self._forget(line.socket)
        cuda = bool(hello["cuda"]) and self._device.type == "cuda"
        line.send({"proof": _proof(self._secret, "trainer", str(hello["nonce"])), "cuda": cuda})
        line.limit(None)  # an engine asks when there is something to ask for
        return _nccl(line, _TRAINER) if cuda else None

    def _forget(self, connection: socket.socket) -> None:
        with contextlib.suppress(ValueError):
            self._unproven.remove(connection)

    def _answer(self, line: _Line, group: Any, publication: int) -> None:
        with self._sending:
            if publication != self._publication or self._version is None:
                line.send({"problem": f"the trainer holds version {self._version} now"})
                return
            line.send({})
            if group is None:
                line.send_block(self._block)
                return
            group.send([self._block], _ENGINE, 0).wait(timedelta(seconds=SECONDS))
            _settle(self._block)


class _Line:
    """One end of a connection between the trainer and an engine: JSON lines and blocks of bytes."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.keys: dict[str, bytes] = {}
        """Keys and values that either end has put into the store of the group."""
        self._read = connection.makefile("rb")

    def limit(self, seconds: float | None) -> None:
        """Let every later wait end after this time; None waits for ever."""
        self.socket.settimeout(seconds)

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Receive a message that is not for the store, or None if the other end has closed the connection."""
        while (message := self._message()) is not None and "key" in message:
            self.keys[message["key"]] = bytes.fromhex(message["value"])
        return message

    def receive_key(self, key: str) -> bytes:
        """Return a value of the store; wait until the other end sends it."""
        while key not in self.keys:
            message = self._message()
            if message is None or "key" not in message:
                raise ConnectionError(f"expected the key {key!r} of a group, got {message}")
            self.keys[message["key"]] = bytes.fromhex(message["value"])
        return self.keys[key]

    def send_block(self, block: torch.Tensor) -> None:
        data: Any = block.cpu().numpy()
        self.limit(SECONDS)
        for begin in range(0, len(data), CHUNK):
            self.socket.sendall(data[begin : begin + CHUNK])
        self.limit(None)

    def receive_block(self, block: torch.Tensor) -> None:
        data: Any = memoryview(block.numpy().data)
        begin = 0
        while begin < len(data):
            n = self._read.readinto(data[begin : begin + CHUNK])
            if not n:
                raise ConnectionError(f"the trainer has hung up after {begin} of {len(data)} bytes")
            begin += n

    def close(self) -> None:
        self._read.close()
        self.socket.close()

    def _message(self) -> dict[str, Any] | None:
        line = self._read.readline(LONGEST)
        message = json.loads(line) if line else None
        if not isinstance(message, dict | None):
            raise ValueError(f"a message that is {line[:80]!r}; expected a JSON object")
        return message


class _Partner:
    """An engine's connection to one trainer, with the last block that it received."""

    def __init__(self, host: str, port: int, secret: str) -> None:
        self._line = _Line(socket.create_connection((host, port), timeout=SECONDS))
        try:
            cuda = self._meet(secret)
            self._group = _nccl(self._line, _ENGINE) if cuda else None
        except BaseException:
            self.close()
            raise
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else "cpu"
        self._block = torch.empty(0, dtype=torch.uint8, device=device)
        self._publication: int | None = None

    def _meet(self, secret: str) -> bool:
        """Return whether the block comes by NCCL.  Raises ConnectionError if the other end is a stranger."""
        greeting, nonce = self._received(), secrets.token_hex(16)
        proof = _proof(secret, "engine", str(greeting.get("nonce")))
        answer = self._ask({"proof": proof, "nonce": nonce, "cuda": torch.cuda.is_available()})
        if not hmac.compare_digest(str(answer.get("proof")), _proof(secret, "trainer", nonce)):
            raise ConnectionError("whoever listens there is not the trainer of this run")
        return bool(answer["cuda"])

    def pull(self, publication: int, nbytes: int) -> torch.Tensor:
        if self._publication == publication:
            return self._block
        self._publication = None
        answer = self._ask({"publication": publication})
        if "problem" in answer:
            raise ValueError(answer["problem"])
        if self._block.numel() != nbytes:
            self._block = torch.empty(nbytes, dtype=torch.uint8, device=self._block.device)
        if self._group is None:
            self._line.receive_block(self._block)
        else:
            with _aside(self._block.device):
                self._group.recv([self._block], _TRAINER, 0).wait(timedelta(seconds=SECONDS))
                _settle(self._block)
        self._publication = publication
        return self._block

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        self._line.send(message)
        return self._received()

    def _received(self) -> dict[str, Any]:
        answer = self._line.receive()
        if answer is None:
            raise ConnectionError("the trainer has hung up")
        return answer

    def close(self) -> None:
        self._line.close()


_partners: dict[tuple[str, int, str], _Partner] = {}
"""The connection to the last trainer."""


def pulled(weights: Weights) -> torch.Tensor:
    """Return a copy of the trainer's block, uint8 [nbytes]; it overwrites the copy of another version.

    Raises WeightSyncError if the trainer cannot be reached, or already holds another version.
    """
    try:
        host, port, secret, publication = json.loads(weights.location.removeprefix(COLLECTIVE))
        if (host, port, secret) not in _partners:
            _hang_up()
            _partners[host, port, secret] = _Partner(host, port, secret)
        return _partners[host, port, secret].pull(publication, weights.nbytes)
    except (OSError, RuntimeError, ValueError, KeyError) as error:
        _hang_up()
        raise WeightSyncError(
            f"version {weights.version} did not arrive from the trainer: {error} (engine.transport is "
            '"collective"; engine.collective_host must be an address at which engines reach the trainer)'
        ) from None


def _hang_up() -> None:
    while _partners:
        _partners.popitem()[1].close()


def _nccl(line: _Line, rank: int) -> Any:
    """Make a group of two that uses NCCL, independent of the default group of the process."""
    chosen = _dist.ProcessGroupNCCL.Options()
    chosen._timeout = timedelta(seconds=SECONDS)
    return _dist.ProcessGroupNCCL(_line_store(line), rank, 2, chosen)


def _line_store(line: _Line) -> Any:
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


def _proof(secret: str, who: str, nonce: str) -> str:
    """Return what only an end with the secret can say; ``who`` keeps an answer from being sent back."""
    return hmac.digest(secret.encode(), f"{who} {nonce}".encode(), "sha256").hex()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has gone already
        connection.shutdown(socket.SHUT_RDWR)


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
