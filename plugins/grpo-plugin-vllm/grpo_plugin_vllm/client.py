"""HTTP client of a vLLM server, with time limits and checks of every status."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import aiohttp

import grpo_core
from grpo_core import EngineError, Unavailable
from grpo_core.kit import read_body

NAME = "engine vllm:http"
"""Name of the engine in messages."""

BUSY = frozenset({429, 502, 503, 504})
"""Statuses that ask to retry later: the request had no effect."""

LARGEST = 1 << 20
"""Default of the largest size of an answer in bytes."""

HINTS = {
    403: "; start it with --enable-scale-out",
    404: "; start it with VLLM_SERVER_DEV_MODE=1 in its environment",
}

REDIRECTED = "; redirects are not followed: set engine.options.url to the server's own address"


class ServerError(EngineError):
    """Raised if the server refuses or fails a request, or is unreachable."""


class UnreachableError(ServerError, Unavailable):
    """Raised without a connection, or for a status in ``BUSY``, as during the server's start."""


class Client:
    """A client of a vLLM server's HTTP routes.

    Args:
        url: address of the server.
        seconds: time limit of a request.
        connect_seconds: time limit of connecting.
        remote: allow a server on another machine.  Its routes for weights have no authentication.
        api_key: sent as a bearer token; never part of a message.

    Raises ConfigError for an invalid address.
    """

    def __init__(
        self,
        url: str,
        *,
        seconds: float,
        connect_seconds: float,
        remote: bool,
        api_key: str = "",
    ) -> None:
        self._url = checked_url(url, remote=remote)
        self._key = api_key
        self._headers = {"Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=connect_seconds)
        self._session: aiohttp.ClientSession | None = None

    async def get(
        self, path: str, *, query: Mapping[str, str] | None = None, seconds: float | None = None
    ) -> Any:
        return await self._json("GET", path, query=query, seconds=seconds)

    async def page(self, path: str, *, seconds: float) -> str:
        """Return a page as text."""
        return await self._call("GET", path, seconds=seconds)

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        seconds: float | None = None,
        largest: int = LARGEST,
    ) -> Any:
        """Return the JSON of the answer.

        Args:
            seconds: time limit, instead of the client's.
            largest: largest size of the answer in bytes.

        Raises ServerError; UnreachableError if the request had no effect.
        """
        return await self._json("POST", path, body=body, query=query, seconds=seconds, largest=largest)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _json(self, method: str, path: str, **how: Any) -> Any:
        text = await self._call(method, path, **how)
        try:
            return json.loads(text) if text else None
        except (ValueError, RecursionError):
            raise ServerError(
                f"{method} {self._url}{path}: expected JSON, got {text[:200]!r}; is this a vLLM server?"
            ) from None

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        seconds: float | None = None,
        largest: int = LARGEST,
    ) -> str:
        if self._session is None:
            # limit=0: the engine limits its requests, so that time limits exclude waiting for a connection.
            # No compression: a few compressed bytes can expand to gigabytes.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=self._headers,
                auto_decompress=False,
            )
        timeout = self._timeout if seconds is None else aiohttp.ClientTimeout(total=seconds)
        # after a redirect another machine would receive the prompts and could forge answers
        request = partial(
            self._session.request, method, self._url + path, json=body, params=query, timeout=timeout,
            allow_redirects=False,
        )  # fmt: skip
        what = f"{method} {self._url}{path}"
        try:
            return await self._once(what, request, largest)
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise UnreachableError(f"{what}: no connection: {error}") from error
        except TimeoutError as error:
            raise ServerError(f"{what}: no answer within {seconds or self._timeout.total:g} s") from error
        except aiohttp.ClientError as error:
            raise ServerError(f"{what}: {type(error).__name__}: {error}") from error

    async def _once(self, what: str, request: Callable[[], Any], largest: int) -> str:
        async with request() as response:
            try:
                read = await read_body(response.content.iter_any(), response.headers, largest)
            except ValueError as error:
                raise ServerError(f"{what}: {error}; is this a vLLM server?") from error
            text = read.decode(errors="replace")
            if self._key:  # a server or proxy may echo the key, and messages are written to files
                text = text.replace(self._key, "[key]")
            if response.status in BUSY:
                raise UnreachableError(f"{what}: status {response.status}: {text[:500]}")
            if response.status != 200:
                raise ServerError(
                    f"{what}: status {response.status}: {text[:2000]}"
                    f"{HINTS.get(response.status, REDIRECTED if 300 <= response.status < 400 else '')}"
                )
        return text


def checked_url(url: str, *, remote: bool) -> str:
    """Return the URL without a final slash.

    Raises ConfigError for an invalid URL, or for a remote one without ``remote``.
    """
    risk = "A vLLM server that takes weights lets anybody who reaches it replace its model."
    return grpo_core.checked_url(url, who=NAME, remote=remote, risk=risk, option="engine.options.remote")
