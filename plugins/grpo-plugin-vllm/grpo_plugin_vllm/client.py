"""HTTP client of a vLLM server, with time limits and checks of every status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpo_core
from grpo_core import EngineError, Unavailable
from grpo_core.kit import services

NAME = "engine vllm:http"
"""Name of the engine in messages."""

LARGEST = 1 << 20
"""Default of the largest size of an answer in bytes."""

HINTS = {
    403: "; start it with --enable-scale-out",
    404: "; start it with VLLM_SERVER_DEV_MODE=1 in its environment",
}


class ServerError(EngineError):
    """Raised if the server refuses or fails a request, or is unreachable."""


class UnreachableError(ServerError, Unavailable):
    """Raised without a connection, or for a status that asks to retry, as during the server's start."""


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
        self._client = services.Client(
            checked_url(url, remote=remote),
            who=NAME,
            key=api_key,
            seconds=seconds,
            connect_seconds=connect_seconds,
            largest=LARGEST,
        )
        self.aclose = self._client.aclose

    async def get(
        self, path: str, *, query: Mapping[str, str] | None = None, seconds: float | None = None
    ) -> Any:
        return await self._json("GET", path, query=query, seconds=seconds)

    async def page(self, path: str, *, seconds: float) -> str:
        """Return a page as text."""
        return (await self._call("GET", path, seconds=seconds)).text

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

    async def _json(self, method: str, path: str, **how: Any) -> Any:
        answer = await self._call(method, path, **how)
        try:
            return answer.json(object) if answer.text else None
        except services.ServiceError as error:
            raise ServerError(f"{error}; is this a vLLM server?") from None

    async def _call(self, method: str, path: str, **how: Any) -> services.Answer:
        try:
            answer = await self._client.request(method, path, **how)
        except services.NotSent as error:
            raise UnreachableError(str(error), retry_after=error.retry_after) from error
        except (services.ServiceError, Unavailable) as error:
            raise ServerError(str(error)) from error
        if answer.status != 200:
            raise ServerError(str(answer.refused(HINTS.get(answer.status, ""))))
        return answer


def checked_url(url: str, *, remote: bool) -> str:
    """Return the URL without a final slash.

    Raises ConfigError for an invalid URL, or for a remote one without ``remote``.
    """
    risk = "A vLLM server that takes weights lets anybody who reaches it replace its model."
    return grpo_core.checked_url(url, who=NAME, remote=remote, risk=risk, option="engine.options.remote")
