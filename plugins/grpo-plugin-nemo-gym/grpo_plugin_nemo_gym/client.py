"""HTTP client of a resources server, with retries, and cookies for each rollout."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any

from attrs import define, field

import grpo_core as grpo
from grpo_core.kit import services

BUSY = frozenset({429, 503})
"""Statuses that ask to retry later: the request had no effect."""

LARGEST = 1 << 24
"""Largest size of an answer in bytes; /verify returns the whole rollout."""


class Refused(grpo.GrpoError):
    """Raised for an answer with an error status."""


@define(eq=False)
class Session:
    """The session of a rollout, with tools from the row and from the server's MCP endpoint."""

    tools: list[grpo.Tool] = field(factory=list)
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
        self._retries = retries
        self.headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._client = services.Client(
            url, who="nemo_gym", key=key, seconds=timeout, busy=BUSY, largest=LARGEST
        )
        self.aclose = self._client.aclose

    async def post(self, path: str, body: Any, session: Session) -> dict[str, Any]:
        """Return the JSON object of the answer.  Raises Unavailable, SessionLost, Refused."""
        answer = await self.answer(path, body, session)
        if answer.status != 200:
            raise Refused(str(answer.refused()))
        try:
            return answer.json(dict)
        except services.ServiceError as error:
            raise Refused(f"{error}; is this a resources server of NeMo Gym?") from None

    async def answer(
        self, path: str, body: Any, session: Session, headers: Mapping[str, str] | None = None
    ) -> services.Answer:
        """Return the answer with any status.  Raises Unavailable, SessionLost."""

        def attempt() -> Awaitable[services.Answer]:
            return self._client.post(path, body, cookies=session.cookies, headers=headers)

        try:
            answer = await services.retried(attempt, self._retries)
        except services.NotSent:
            raise
        except (services.ServiceError, grpo.Unavailable) as error:  # it may have changed the session
            raise grpo.SessionLost(str(error)) from error
        session.cookies |= answer.cookies
        return answer
