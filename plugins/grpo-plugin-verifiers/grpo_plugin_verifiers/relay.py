"""Relays the requests of verifiers' agents to the endpoint of their rollout.

verifiers gives each agent a separate address, where it intercepts requests and calls the model with a client
from a configuration.  Creating a client reads all certificates of the machine, which takes longer than a
short rollout, and clients are kept until the end of the run.  So one client is shared by all rollouts.
"""

from __future__ import annotations

import importlib
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import grpo_core as grpo
from grpo_plugin_verifiers.tasksets import imported


class Relay:
    """The ``Interception`` of an environment of verifiers: each rollout calls the model with its own key.

    Args:
        secrets: keys of the shared tool servers.
    """

    def __init__(self, secrets: Iterable[str]) -> None:
        self._server = imported("verifiers.v1.interception").InterceptionServer(
            state_service_secrets=tuple(secrets)
        )
        self._stack = AsyncExitStack()
        self._http: Any = None
        self._clients: dict[str, Any] = {}
        """The client of each running rollout, by its placeholder configuration."""
        self._numbers = iter(range(2**63))

    async def __aenter__(self) -> Relay:
        http = importlib.import_module("httpx")
        client = http.AsyncClient(
            timeout=None,  # the rollout has a deadline
            limits=http.Limits(max_connections=None, max_keepalive_connections=100),
            verify=False,  # the run's endpoint is plain HTTP
            trust_env=False,
        )
        self._http = await self._stack.enter_async_context(client)
        await self._stack.enter_async_context(self._server)
        return self

    async def __aexit__(self, *details: object) -> None:
        await self._stack.aclose()

    @contextmanager
    def rollout(self, client: grpo.AgentClient) -> Any:
        """Yield the configuration with which the agents of a rollout call its model."""
        clients = imported("verifiers.v1.clients")
        name = f"GRPO_ROLLOUT_{next(self._numbers)}"  # unset: the key is in no environment
        config = clients.EvalClientConfig(base_url=client.base_url, api_key_var=name)
        self._clients[config.model_dump_json()] = self._client(client)
        try:
            yield config
        finally:
            self._server.clients.pop(config.model_dump_json(), None)
            del self._clients[config.model_dump_json()]

    @asynccontextmanager
    async def acquire(self, session: Any) -> AsyncIterator[tuple[str, str, str]]:
        """Yield address and secrets of an agent, in the interface of verifiers."""
        config = session.ctx.client.model_dump_json()
        if config in self._clients:  # agents with other models keep verifiers' client
            self._server.clients[config] = self._clients[config]
        async with self._server.acquire(session) as slot:
            yield slot

    def _client(self, client: grpo.AgentClient) -> Any:
        base = imported("verifiers.v1.clients").EvalClient
        made = base.__new__(base)  # skip the constructor, which reads the certificates
        made.base_url, made.api_key, made.headers, made.client = (
            client.base_url,
            client.api_key,
            {},
            self._http,
        )
        return made
