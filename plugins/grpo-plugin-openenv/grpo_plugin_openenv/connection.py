"""A session of an OpenEnv server: one WebSocket, whose messages are answered one by one."""

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
"""Bytes of an answer at most."""

FULL = "CAPACITY_REACHED"
"""Code of the server's error if it has no room for another session."""

WRONG_ACTION = "VALIDATION_ERROR"
"""Code of the server's error for an action that is none."""

RAISED = "EXECUTION_ERROR"
"""Code of the server's error for anything that its environment raises, be it a wrong move or an outage."""


class Rejected(Exception):  # noqa: N818 - it says what happened
    """The server did not take a message."""

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
        """Return the data of the answer.  Raises Rejected; Unavailable if the server is silent or gone."""
        message = {"type": kind} if data is None else {"type": kind, "data": dict(data)}
        async with self._lock:
            try:
                # a server that refuses a session says why and closes: the reason waits to be read
                with contextlib.suppress(ConnectionError):
                    await self.socket.send_str(json.dumps(message, ensure_ascii=False))
                async with asyncio.timeout(self.timeout):
                    got = await self.socket.receive()
            except TimeoutError as error:
                await self.socket.close()  # a late answer would be taken for that to the next message
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
