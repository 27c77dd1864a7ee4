"""Serves the model to agents over HTTP, usually on the loopback address.

There is one server for a run.  Each rollout has a session with its own address, ``/rollouts/ID/v1``, and
its own key, a signature of the ID.  A request belongs to the rollout of its address.  Without a key, or after
the rollout's end, it is refused with 401.  With the key of another rollout it ends the run: the agent mixes
up its rollouts.
"""

from __future__ import annotations

import base64
import contextlib
import hmac
import itertools
import json
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from ipaddress import ip_address
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from grpo_core import (
    AgentClient,
    ConfigError,
    GrpoError,
    Play,
    Player,
    PlayerSetup,
    PluginError,
    Recording,
)
from grpo_core.kit import report
from grpo_plugin_agents.dialects import ANTHROPIC, CHAT, DIALECTS, Dialect
from grpo_plugin_agents.recorder import Conversations
from grpo_plugin_agents.repeats import Attempt
from grpo_plugin_agents.session import (
    MIXED_UP_ADVICE,
    PING,
    Refused,
    Reply,
    Session,
    attempt_digest,
    played,
    refusal,
)

MODEL = "policy"
"""Name of the model in requests."""
MAX_BODY = 32 * 2**20
"""Largest size of a request in bytes."""
CLOSING = 1.0
"""Seconds that open connections get when the server shuts down."""
LOGGER = logging.getLogger(__name__)
LOGGER.addFilter(lambda record: not isinstance((record.exc_info or [None] * 2)[1], HttpProcessingError))
"""Drops log messages about malformed requests, which are answered with status 400."""


class AgentServer(Player):
    """The player ``agents``: an HTTP server on a free port of one address of this machine.

    Args:
        ping: seconds between the comments that keep a stream's connection alive while the engine works.
    """

    def __init__(self, setup: PlayerSetup, *, ping: float = PING) -> None:
        if without := [task for task, runs in setup.tasks.items() if not runs]:
            raise ConfigError(
                f"task {without[0]!r}: its environment defines no async def run, which the player calls"
            )
        if setup.remote and _is_loopback(setup.host):
            raise ConfigError(
                f"task {', '.join(map(repr, setup.tasks))}: agents in workers on other machines cannot reach "
                f"environment.agent_host = {setup.host!r}; set it to an address of this machine in the "
                "cluster's network"
            )
        self._host = setup.host
        self._ping = ping
        self._secret = secrets.token_bytes(32)
        """Signs the keys."""
        self._ids = map(str, itertools.count())
        self._sessions: dict[str, Session] = {}
        """The open sessions, by ID."""
        self._conversations = Conversations()
        self._runner: web.AppRunner | None = None
        self._url = ""
        self._warned: set[str] = set()

    async def start(self) -> None:
        """Open the port.  Raises ConfigError if this machine does not have the address."""
        app = web.Application(client_max_size=MAX_BODY)
        for path, dialect in DIALECTS.items():
            app.router.add_post(_ROLLOUT + path, self._handler(dialect))
        app.router.add_post(f"{_ROLLOUT}/v1/messages/count_tokens", self._count)
        app.router.add_get(f"{_ROLLOUT}/v1/models", self._models)
        app.router.add_get(f"{_ROLLOUT}/v1/models/{{name}}", self._models)
        app.router.add_route("*", "/{path:.*}", _unserved)
        self._runner = web.AppRunner(app, access_log=None, logger=LOGGER, shutdown_timeout=CLOSING)
        await self._runner.setup()
        try:
            if ip_address(self._host).is_unspecified:
                raise ValueError("it stands for all addresses, and agents need one")
            await web.TCPSite(self._runner, self._host, 0, backlog=1024).start()
        except (OSError, ValueError) as error:
            await self._runner.cleanup()
            raise ConfigError(
                f"environment.agent_host = {self._host!r}: {error}; expected an IP address of this machine"
            ) from error
        shown = f"[{self._host}]" if ":" in self._host else self._host
        self._url = f"http://{shown}:{self._runner.addresses[0][1]}"

    async def aclose(self) -> None:
        """End all sessions, and close the port."""
        for session in list(self._sessions.values()):
            await session.aclose()
        if self._runner is not None:
            await self._runner.cleanup()

    async def play(self, play: Play) -> Recording:
        """Let the environment's agent play a rollout while its model is served."""
        return await played(self.open(play))

    def open(self, play: Play) -> Session:
        """Begin the session of a rollout."""
        if self._runner is None:
            raise GrpoError("the endpoint for agents is not started")
        id = next(self._ids)
        url = f"{self._url}{_ROLLOUT.format(id=id)}/v1"
        session = Session(
            client=AgentClient(base_url=url, api_key=self._key(id), model=MODEL),
            play=play,
            ended=lambda: self._sessions.pop(id, None),
            ignored=self._ignored,
            conversations=self._conversations,
        )
        self._sessions[id] = session
        return session

    def _key(self, id: str) -> str:
        """Return the key of a rollout; without the secret nobody can make one."""
        signature = hmac.digest(self._secret, id.encode("utf-8", "surrogateescape"), "sha256")
        return f"sk-grpo-{id}-{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"

    def _ignored(self, names: Sequence[str]) -> None:
        """Report sampling parameters that have no effect, each once."""
        new = sorted(set(names) - self._warned)
        self._warned.update(new)
        if new:
            report(
                "agent_option",
                "agents",
                f"agents request {', '.join(new)}, which has no effect: the run samples as its configuration "
                "says, because the loss assumes it (rollout.temperature)",
            )

    # ------------------------------------------------------------------------------ handlers

    def _handler(self, dialect: Dialect) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            session = self._session(request, dialect)
            try:
                body = await request.read()
            except web.HTTPRequestEntityTooLarge:
                message = f"the body has more than {MAX_BODY} bytes"
                return _json(dialect.error(413, message, "too_large"), 413)
            attempt, wire = _attempt(request, body), _Wire(request)
            try:
                call, reply = await session.reply(dialect, body, attempt, alive=wire.ping, every=self._ping)
            except Refused as refused:
                return await wire.send(refusal(dialect, refused))
            response = await wire.send(reply)
            if not attempt.gone():
                session.delivered(call, attempt)
            return response

        return handle

    async def _count(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request, ANTHROPIC)
        return await _Wire(request).send(await session.count_tokens(ANTHROPIC, await request.read()))

    async def _models(self, request: web.Request) -> web.StreamResponse:
        self._session(request, CHAT)
        if "name" in request.match_info:
            return _json(_MODEL)
        return _json(
            {"object": "list", "data": [_MODEL], "has_more": False, "first_id": MODEL, "last_id": MODEL}
        )

    def _session(self, request: web.Request, dialect: Dialect) -> Session:
        """Return the session of the request's address.

        Raises HTTPException if the key in the headers is not the session's; if it is another's, the run ends.
        """
        given = request.headers.get("Authorization", "")
        key = given[7:] if given[:7].lower() == "bearer " else request.headers.get("x-api-key", "")
        id = request.match_info["id"]
        owner = key.strip().removeprefix("sk-grpo-").partition("-")[0]
        sent = key.strip().encode("utf-8", "surrogateescape")
        if not hmac.compare_digest(sent, self._key(owner).encode("utf-8", "surrogateescape")):
            message = "this key does not belong to a running rollout"
            raise web.HTTPUnauthorized(**_error(dialect, 401, message, "invalid_api_key"))
        running = [self._sessions[each] for each in (id, owner) if each in self._sessions]
        if not running:
            message = "this rollout has ended; a client that is made once needs the address and key of each"
            raise web.HTTPUnauthorized(**_error(dialect, 401, message, "ended"))
        if owner != id:
            mixed = PluginError(
                f"agents: a request to the address of rollout {id} has the key of rollout {owner}. "
                f"{MIXED_UP_ADVICE}"
            )
            for session in running:
                session.fail(mixed)
            raise web.HTTPForbidden(**_error(dialect, 403, str(mixed), "another_rollout"))
        return running[0]


_ROLLOUT = "/rollouts/{id}"
"""Path of a rollout; the paths of the dialects are below it."""


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # refused when the port is opened
        return False


_MODEL = {"id": MODEL, "object": "model", "type": "model", "display_name": MODEL, "created": 0,
          "created_at": "1970-01-01T00:00:00Z", "owned_by": "grpo-core"}  # fmt: skip


def _attempt(request: web.Request, body: bytes) -> Attempt:
    retries, protocol = request.headers.get("x-stainless-retry-count", ""), request.protocol

    def gone() -> bool:  # the session stores this function; it must not keep the request and its body alive
        return protocol.transport is None or protocol.transport.is_closing()

    return Attempt(
        body=attempt_digest(request.path, body),
        key=request.headers.get("Idempotency-Key", ""),
        retries=int(retries) if retries.isdecimal() else None,
        gone=gone,
    )


class _Wire:
    """The response to a client; a stream begins before the reply is complete."""

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self._begun: web.StreamResponse | None = None

    async def ping(self) -> None:
        """Send a comment in a stream, which clients skip; the first call sends the headers, too."""
        with contextlib.suppress(ConnectionError):
            if self._begun is None:
                headers = {"Content-Type": _EVENTS, "Cache-Control": "no-cache"}
                begun = web.StreamResponse(headers=headers)
                await begun.prepare(self._request)
                self._begun = begun
            await self._begun.write(b": ping\n\n")

    async def send(self, reply: Reply) -> web.StreamResponse:
        """Send the whole reply; stop silently if the client closed the connection."""
        if self._begun is not None:
            with contextlib.suppress(ConnectionError):
                await self._begun.write_eof(reply.body if reply.status == 200 else reply.failure)
            return self._begun
        kind = _EVENTS if reply.stream and reply.status == 200 else "application/json; charset=utf-8"
        response = web.Response(body=reply.body, status=reply.status, headers={"Content-Type": kind})
        with contextlib.suppress(ConnectionError):
            await response.prepare(self._request)
            await response.write_eof()
        return response


_EVENTS = "text/event-stream; charset=utf-8"


def _json(data: object, status: int = 200) -> web.Response:
    return web.Response(body=json.dumps(data).encode(), status=status, content_type="application/json")


async def _unserved(request: web.Request) -> web.Response:
    message = f"{request.path[:200]} is not served; the model is at client.base_url, including its path"
    raise web.HTTPNotFound(**_error(CHAT, 404, message, "not_found"))


def _error(dialect: Dialect, status: int, message: str, code: str) -> dict[str, Any]:
    """Return the arguments of an ``HTTPException``."""
    return {"text": json.dumps(dialect.error(status, message, code)), "content_type": "application/json"}
