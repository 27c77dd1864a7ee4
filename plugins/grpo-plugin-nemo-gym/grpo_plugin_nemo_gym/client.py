"""HTTP client of a resources server, with retries, and cookies for each rollout."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aiohttp
import stamina
from attrs import define, field

import grpo_core as grpo
from grpo_core.kit import read_body, read_json

BUSY = frozenset({429, 503})
"""Statuses that ask to retry later: the request had no effect."""

LARGEST = 1 << 24
"""Largest size of an answer in bytes; /verify returns the whole rollout."""


class _Unsent(Exception):  # noqa: N818 - internal: the server did not process the request
    """Raised if a request had no effect, so that a retry is safe."""


class Refused(grpo.GrpoError):
    """Raised for an answer with an error status."""


@define
class Session:
    """The cookies of a rollout, and the headers for its MCP tools."""

    cookies: dict[str, str] = field(factory=dict)
    mcp_path: str = ""
    mcp_headers: dict[str, str] = field(factory=dict)


class Client:
    """A client of one resources server.

    A request is retried only if it certainly had no effect: there was no connection, or the status asks to
    retry.  Any other failure may have changed the session, so the rollout is played again from the start.

    Args:
        url: address of the server.
        key: sent as a bearer token unless empty; never part of a message.
        timeout: seconds for each attempt.
        retries: number of attempts after the first.
    """

    def __init__(self, url: str, key: str, timeout: float, retries: int) -> None:
        self._url, self._key, self._retries = url, key, retries
        self._timeout = aiohttp.ClientTimeout(total=timeout)
        self._http: aiohttp.ClientSession | None = None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    async def post(self, path: str, body: Any, session: Session) -> dict[str, Any]:
        """Return the JSON object of the answer.  Raises Unavailable, SessionLost, Refused."""
        status, text = await self.answer(path, body, session)
        if status != 200:
            raise Refused(f"nemo_gym: POST {self._url}{path}: status {status}: {text[:1000]}")
        try:
            return read_json(text, dict)
        except ValueError:
            raise Refused(
                f"nemo_gym: POST {self._url}{path}: expected a JSON object, got {text[:200]!r}; is this a "
                "resources server of NeMo Gym?"
            ) from None

    async def answer(
        self, path: str, body: Any, session: Session, headers: Mapping[str, str] | None = None
    ) -> tuple[int, str]:
        """Return status and text of the answer for any status.  Raises Unavailable, SessionLost."""
        what = f"nemo_gym: POST {self._url}{path}"
        try:
            attempts = stamina.retry_context(
                on=_Unsent, attempts=self._retries + 1, timeout=None, wait_max=8.0
            )
            async for attempt in attempts:
                with attempt:
                    return await self._once(path, body, session, headers or {})
        except _Unsent as error:
            raise grpo.Unavailable(f"{what}: {error} ({self._retries + 1} attempts)") from error
        except TimeoutError as error:
            raise grpo.SessionLost(f"{what}: no answer within {self._timeout.total:g} s") from error
        except (aiohttp.ClientError, ValueError) as error:  # for example invalid headers
            raise grpo.SessionLost(f"{what}: {type(error).__name__}: {error}") from error
        raise AssertionError("a retry that ends without a result raises")

    async def aclose(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    async def _once(
        self, path: str, body: Any, session: Session, headers: Mapping[str, str]
    ) -> tuple[int, str]:
        if self._http is None:  # a shared cookie jar would mix rollouts
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=self._timeout,
                headers={"Accept-Encoding": "identity", **self.headers},
                auto_decompress=False,
            )
        try:
            async with self._http.post(
                self._url + path, json=body, cookies=session.cookies, headers=headers, allow_redirects=False
            ) as response:
                try:
                    text = (await read_body(response.content.iter_any(), response.headers, LARGEST)).decode(
                        errors="replace"
                    )
                except ValueError as error:
                    raise aiohttp.ClientPayloadError(str(error)) from error
                if self._key:  # a server may echo the key, and messages are written to files
                    text = text.replace(self._key, "[key]")
                if response.status in BUSY:
                    raise _Unsent(f"status {response.status}: {text[:300]}")
                session.cookies |= {name: morsel.value for name, morsel in response.cookies.items()}
                return response.status, text
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _Unsent(f"no connection: {error}") from error
