"""The protocol between trainer and engine: proof of the secret, JSON lines, blocks of bytes."""

from __future__ import annotations

import contextlib
import hmac
import json
import select
import socket
import time
from typing import Any

import torch

LONGEST = 1000
"""Largest size of a message in bytes."""
CHUNK = 64 << 20
"""Size in bytes of a part of a block; each part has a separate time limit."""


def proof(secret: str, who: str, nonce: str) -> str:
    """Return the HMAC of a nonce; ``who`` prevents reflection of a proof."""
    return hmac.digest(secret.encode(), f"{who} {nonce}".encode(), "sha256").hex()


def proves(said: object, secret: str, who: str, nonce: str) -> bool:
    """Whether a proof is right, compared in constant time."""
    return hmac.compare_digest(str(said).encode(), proof(secret, who, nonce).encode())


class Line:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.keys: dict[str, bytes] = {}
        """Contents of the store of an NCCL group; see ``nccl``."""
        self._read = connection.makefile("rb")
        self._watch = select.poll()
        self._watch.register(connection, select.POLLIN)

    def limit(self, seconds: float | None) -> None:
        """Set the time limit of later operations; None is unlimited."""
        self.socket.settimeout(seconds)

    def send(self, message: dict[str, Any]) -> None:
        self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> dict[str, Any] | None:
        """Receive the next message outside of the store; None if the connection was closed."""
        while (message := self._message()) is not None and "key" in message:
            self.keys[message["key"]] = bytes.fromhex(message["value"])
        return message

    def receive_first(self, deadline: float) -> dict[str, Any]:
        """Receive the first message of an unauthenticated peer, with bounded memory and time.

        Raises OSError after ``deadline`` (in ``time.monotonic``), ValueError for an invalid message.
        """
        line = b""
        while len(line) < LONGEST and not line.endswith(b"\n"):  # a peer could send single bytes slowly
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("the first message took too long")
            self.limit(left)
            if not (byte := self._read.read(1)):
                break
            line += byte
        return _message_in(line) or {}

    def receive_key(self, key: str) -> bytes:
        """Return a value of the store, after waiting for the other end to send it."""
        while key not in self.keys:
            message = self._message()
            if message is None or "key" not in message:
                raise ConnectionError(f"expected the key {key!r} of a group, got {message}")
            self.keys[message["key"]] = bytes.fromhex(message["value"])
        return self.keys[key]

    def send_block(self, block: torch.Tensor) -> None:
        for begin in range(0, block.numel(), CHUNK):
            part: Any = block[begin : begin + CHUNK].cpu().numpy()
            self.socket.sendall(part)

    def receive_block(self, block: torch.Tensor) -> None:
        """Fill a block in host memory.  Raises ConnectionError if the connection is closed before the end."""
        data: Any = memoryview(block.numpy().data)
        begin = 0
        while begin < len(data):
            n = self._read.readinto(data[begin : begin + CHUNK])
            if not n:
                raise ConnectionError(f"the connection ended after {begin} of {len(data)} bytes")
            begin += n

    def hung_up(self, seconds: float) -> bool:
        """Wait at most ``seconds``; return whether the connection was closed by either end.

        Call this only while no message is expected.
        """
        if not self._watch.poll(seconds * 1000):
            return False
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True

    def hang_up(self) -> None:
        """Close the connection; a thread that waits for it gets an error."""
        shut(self.socket)

    def close(self) -> None:
        self._read.close()
        self.socket.close()

    def _message(self) -> dict[str, Any] | None:
        return _message_in(self._read.readline(LONGEST))


def _message_in(line: bytes) -> dict[str, Any] | None:
    message = json.loads(line) if line else None
    if not isinstance(message, dict | None):
        raise ValueError(f"a message that is {line[:80]!r}; expected a JSON object")
    return message


def shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed already
        connection.shutdown(socket.SHUT_RDWR)
