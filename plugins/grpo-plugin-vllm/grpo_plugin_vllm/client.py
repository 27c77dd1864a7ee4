"""HTTP to a vLLM server: every wait has an end, every status is looked at, and one place tries again."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import aiohttp
import stamina

import grpo_core
from grpo_core import ConfigError, EngineError
from grpo_core.kit import read_body, report

NAME = "engine vllm:http"
"""Name of the engine in messages."""

BUSY = frozenset({429, 502, 503, 504})
"""Statuses that say "later": the request has done nothing."""

LARGEST = 1 << 20
"""Bytes of an answer at most, unless the request says otherwise."""

HINTS = {
    403: "; start it with --enable-scale-out",
    404: "; start it with VLLM_SERVER_DEV_MODE=1 in its environment",
}

REDIRECTED = "; redirects are not followed: set engine.options.url to the server's own address"


class ServerError(EngineError):
    """The server refused a request or failed at it, or cannot be reached."""


class UnreachableError(ServerError):
    """There is no connection, or the server says "later", as one that starts does."""


class Unsent(Exception):  # noqa: N818 - internal: the server has not begun
    """The request did nothing: trying again is always safe."""


stamina.instrumentation.set_on_retry_hooks(())
"""Its own hooks print a line for each retry, without the cause and the address: an incident has both."""


class Client:
    """A client of a vLLM server's HTTP routes.

    Args:
        url: of the server.
        seconds: for one request from start to end, at most.
        connect_seconds: for the connection.
        attempts: of a request, at least 1.
        remote: allow a server on another machine.  Its routes for weights have no authentication.
        api_key: is sent as a bearer token; it stands in no message.

    Raises ConfigError for what cannot be a server.
    """

    def __init__(
        self,
        url: str,
        *,
        seconds: float,
        connect_seconds: float,
        attempts: int,
        remote: bool,
        api_key: str = "",
    ) -> None:
        self._url = checked_url(url, remote=remote)
        if attempts < 1:
            raise ConfigError(f"engine vllm:http: attempts = {attempts}; expected at least 1")
        self._attempts = attempts
        self._key = api_key
        self._headers = {"Accept-Encoding": "identity"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=connect_seconds)
        self._session: aiohttp.ClientSession | None = None

    async def get(
        self, path: str, *, query: Mapping[str, str] | None = None, seconds: float | None = None
    ) -> Any:
        return await self._json("GET", path, query=query, repeatable=True, seconds=seconds)

    async def page(self, path: str, *, seconds: float) -> str:
        """Return a page of text."""
        return await self._call("GET", path, repeatable=True, seconds=seconds)

    async def post(
        self,
        path: str,
        body: Any = None,
        *,
        query: Mapping[str, str] | None = None,
        repeatable: bool = False,
        seconds: float | None = None,
        largest: int = LARGEST,
    ) -> Any:
        """The answer's JSON.

        Args:
            repeatable: a second one does no harm, so it is tried again also if it may have been begun.
            seconds: instead of the client's own.
            largest: number of bytes after which the answer is given up.

        Raises ServerError: at once for a status that a repetition cannot change, else when the attempts are
        used up.
        """
        return await self._json(
            "POST", path, body=body, query=query, repeatable=repeatable, seconds=seconds, largest=largest
        )

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
        repeatable: bool,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        seconds: float | None = None,
        largest: int = LARGEST,
    ) -> str:
        timeout = self._timeout if seconds is None else aiohttp.ClientTimeout(total=seconds)
        # a redirect could name another machine, which would get the prompts and could make up the answers
        request = partial(
            self._open().request, method, self._url + path, json=body, params=query, timeout=timeout,
            allow_redirects=False,
        )  # fmt: skip
        again = (Unsent, aiohttp.ClientConnectionError) if repeatable else (Unsent,)
        what = f"{method} {self._url}{path}"
        try:
            async for attempt in stamina.retry_context(on=again, attempts=self._attempts, timeout=None):
                with attempt:
                    try:
                        return await self._once(what, request, largest)
                    except again as error:
                        if attempt.num < self._attempts:
                            tried = f"attempt {attempt.num} of {self._attempts}"
                            report("retried", NAME, f"{what}: {error}; trying again ({tried})")
                        raise
        except Unsent as error:
            raise UnreachableError(f"{what}: {error} ({self._attempts} attempts)") from error
        except TimeoutError as error:
            raise ServerError(f"{what}: no answer within {seconds or self._timeout.total:g} s") from error
        except aiohttp.ClientError as error:
            raise ServerError(f"{what}: {type(error).__name__}: {error}") from error
        raise AssertionError("a retry that ends without a result raises")

    async def _once(self, what: str, request: Callable[[], Any], largest: int) -> str:
        try:
            async with request() as response:
                try:
                    read = await read_body(response.content.iter_any(), response.headers, largest)
                except ValueError as error:
                    raise ServerError(f"{what}: {error}; is this a vLLM server?") from error
                text = read.decode(errors="replace")
                if (
                    self._key
                ):  # a server or a proxy may repeat what it was sent; messages are written to files
                    text = text.replace(self._key, "[key]")
                if response.status in BUSY:
                    raise Unsent(f"status {response.status}: {text[:500]}")
                if response.status != 200:
                    raise ServerError(
                        f"{what}: status {response.status}: {text[:2000]}"
                        f"{HINTS.get(response.status, REDIRECTED if 300 <= response.status < 400 else '')}"
                    )
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise Unsent(f"no connection: {error}") from error
        return text

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            # limit=0: the engine limits its requests; their time does not include waiting for a connection
            # Answers come as they are: a few compressed bytes can unfold to gigabytes.
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                headers=self._headers,
                auto_decompress=False,
            )
        return self._session


def checked_url(url: str, *, remote: bool) -> str:
    """Return the URL without a final slash.

    Raises ConfigError for an invalid URL, or for a remote one without ``remote``.
    """
    risk = "A vLLM server that takes weights lets anybody who reaches it replace its model."
    return grpo_core.checked_url(url, who=NAME, remote=remote, risk=risk, option="engine.options.remote")
