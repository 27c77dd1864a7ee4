"""A connection between the trainer and an engine: a proof of the secret, JSON lines, blocks of bytes."""

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
"""Bytes of a block that are sent at once: each part has its own time limit."""


def proof(secret: str, who: str, nonce: str) -> str:
    """Return what only an end with the secret can say; ``who`` keeps an answer from being sent back."""
    return hmac.digest(secret.encode(), f"{who} {nonce}".encode(), "sha256").hex()


def proves(said: object, secret: str, who: str, nonce: str) -> bool:
    """Return whether the other end has said the proof; comparing takes the same time for any wrong one."""
    return hmac.compare_digest(str(said).encode(), proof(secret, who, nonce).encode())


class Line:
    """One end of a connection."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self.keys: dict[str, bytes] = {}
        """Keys and values that either end has put into the store of a group; see ``nccl``."""
        self._read = connection.makefile("rb")
        self._watch = select.poll()
        self._watch.register(connection, select.POLLIN)

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

    def receive_first(self, deadline: float) -> dict[str, Any]:
        """Receive the first message of an end that has not proven itself; keep nothing else of it.

        Raises OSError if none arrives until this time of ``time.monotonic``, ValueError for other bytes.
        """
        line = b""
        while len(line) < LONGEST and not line.endswith(b"\n"):  # each byte could take all of the time
            if (left := deadline - time.monotonic()) <= 0:
                raise TimeoutError("the first message took too long")
            self.limit(left)
            if not (byte := self._read.read(1)):
                break
            line += byte
        return _message_in(line) or {}

    def receive_key(self, key: str) -> bytes:
        """Return a value of the store; wait until the other end sends it."""
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
        """Fill a block in the host's memory.  Raises ConnectionError if the other end hangs up before."""
        data: Any = memoryview(block.numpy().data)
        begin = 0
        while begin < len(data):
            n = self._read.readinto(data[begin : begin + CHUNK])
            if not n:
                raise ConnectionError(f"the connection ended after {begin} of {len(data)} bytes")
            begin += n

    def hung_up(self, seconds: float) -> bool:
        """Wait so long, and return whether the other end, or ``hang_up`` here, has ended the connection.

        To be called only while the other end has nothing to say.
        """
        if not self._watch.poll(seconds * 1000):
            return False
        try:
            return not self.socket.recv(1, socket.MSG_PEEK)
        except ConnectionError:
            return True

    def hang_up(self) -> None:
        """End the connection; another thread that waits for the other end gets an error."""
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
    with contextlib.suppress(OSError):  # it has gone already
        connection.shutdown(socket.SHUT_RDWR)
