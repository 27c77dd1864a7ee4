"""A session of an OpenEnv server: a WebSocket with one answer for each message."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Mapping
from typing import Any

import aiohttp
from attrs import define, field

import grpo_core as grpo
from grpo_core.kit import read_json

LARGEST = 1 << 24
"""Largest size of an answer in bytes."""

FULL = "CAPACITY_REACHED"
"""Error code for a server without capacity for another session."""

WRONG_ACTION = "VALIDATION_ERROR"
"""Error code for an invalid action."""

RAISED = "EXECUTION_ERROR"
"""Error code for any exception of the environment, whether a wrong move or an outage."""


class Rejected(Exception):  # noqa: N818 - named after the outcome
    """Raised if the server rejects a message."""

    def __init__(self, code: str, text: str) -> None:
        super().__init__(f"{text} ({code})" if code else text)
        self.code = code


@define(eq=False)
class Connection:
    """A session of the server.

    Attributes:
        timeout: seconds for each answer.
    """

    socket: aiohttp.ClientWebSocketResponse
    timeout: float
    _lock: asyncio.Lock = field(factory=asyncio.Lock, init=False)

    async def ask(self, kind: str, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the data of the answer.  Raises Rejected; Unavailable if the server does not answer."""
        message = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
        async with self._lock:
            try:
                # a server that refuses a session sends the reason and closes, so try to read it
                with contextlib.suppress(ConnectionError):
                    await self.socket.send_str(json.dumps(message, ensure_ascii=False))
                async with asyncio.timeout(self.timeout):
                    got = await self.socket.receive()
            except TimeoutError as error:
                await self.socket.close()  # a late answer would be attributed to the next message
                raise grpo.Unavailable(f"openenv: no answer to {kind!r} within {self.timeout:g} s") from error
            except aiohttp.ClientError as error:
                raise grpo.Unavailable(f"openenv: {kind!r}: {type(error).__name__}: {error}") from error
        if got.type is not aiohttp.WSMsgType.TEXT:
            how = got.type.name.lower()
            raise grpo.Unavailable(
                f"openenv: the server ended the session ({how}) instead of answering {kind!r}"
            )
        return _data(got.data, kind)

    async def close(self) -> None:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            await self.socket.send_str('{"type": "close"}')
        await self.socket.close()


def _data(text: str, kind: str) -> dict[str, Any]:
    try:
        answer = read_json(text, dict)
        data = answer["data"]
        if answer["type"] == "error":
            message = str(data.get("message", ""))
            if data.get("errors"):
                message += ": " + "; ".join(_error_text(error) for error in data["errors"])
            raise Rejected(str(data.get("code", "")), message[:1000])
        assert isinstance(data, dict)
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise grpo.Unavailable(f"openenv: the answer to {kind!r} is {text[:200]!r}") from error
    return data


def _error_text(error: Any) -> str:
    where = ".".join(str(part) for part in error.get("loc", ()))
    return f"{where}: {error.get('msg', error)}" if where else str(error.get("msg", error))
