"""A session with the service: calls that wait during outages and have deadlines."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

import tinker
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType

from grpo_core import ConfigError, DeadlineExceeded, Unavailable, errors
from grpo_core.kit import Service, aio
from grpo_plugin_tinker.checks import KEY
from grpo_plugin_tinker.section import TinkerConfig

T = TypeVar("T")

NO_KEY = "tml-none"
"""Key for servers without keys; the SDK requires this prefix."""
PROBE = 10.0
"""Seconds without an answer after which the availability of the service is probed."""
RETRIES = 2
"""Number of immediate retries of the SDK's client, below its retries over minutes."""
LONGEST = 300
"""Largest number of characters of an answer in a message."""
FAILURES = (tinker.TinkerError, ValueError, DeadlineExceeded)
"""Errors of a call; the SDK raises ValueError for a failed request."""


class Session:
    """A session with the service, with the SDK's retries.

    The SDK polls for a result forever, whatever happens to the connection.  So a call without a result probes
    the service periodically.  During an outage deadlines are suspended, and after ``tinker.unavailable_for``
    seconds the call raises Unavailable.

    Args:
        who: calling part of the run, for messages.
    """

    def __init__(self, config: TinkerConfig, who: str) -> None:
        self._url, self._who = config.base_url or None, who
        self._availability = Service(who, config.unavailable_for, key="tinker.unavailable_for")
        self._answered = -PROBE
        self._client: tinker.ServiceClient | None = None
        self._beginning = asyncio.Lock()

    async def client(self, seconds: float) -> tinker.ServiceClient:
        """Return the SDK's client; the first call starts the session.

        Raises ConfigError if the service is missing or refuses; DeadlineExceeded.
        """

        def late() -> DeadlineExceeded:
            return DeadlineExceeded(f"{self._who}: the service did not begin a session within {seconds:g} s")

        def begin() -> tinker.ServiceClient:
            key = os.environ.get(KEY) or NO_KEY
            return tinker.ServiceClient(base_url=self._url, api_key=key, max_retries=RETRIES)

        async with self._beginning, aio.time_limit(seconds, late):
            if self._client is None:
                try:
                    self._client = await asyncio.to_thread(begin)
                except tinker.TinkerError as error:
                    raise ConfigError(
                        f"{self._who}: the service at {self._url or 'TINKER_BASE_URL'} does not begin a "
                        f"session: {said(error)}; check tinker.base_url and the variable {KEY}"
                    ) from error
            return self._client

    async def call(
        self, what: str, ask: Callable[[], Awaitable[T]], seconds: float, *, again: bool = False
    ) -> T:
        """Return the answer of the service.

        Args:
            what: name of the call, for messages.
            ask: sends the request.
            again: whether the request may be repeated after an outage before it was accepted.

        Raises DeadlineExceeded after ``seconds`` of availability, Unavailable, and the SDK's errors
        (``FAILURES``).
        """
        loop, used = asyncio.get_running_loop(), 0.0
        task = asyncio.ensure_future(_awaited(ask()))

        async def wait() -> None:
            nonlocal task, used
            began = loop.time()
            await asyncio.wait({task}, timeout=min(PROBE, seconds - used))
            if not task.done():
                away = await self._absence()
            elif away := _absent(task.exception()) if again else None:
                task = asyncio.ensure_future(_awaited(ask()))
            if away is not None:
                raise away
            used += loop.time() - began

        try:
            while not task.done():
                if used >= seconds:
                    raise DeadlineExceeded(f"{self._who}: {what} has no result within {seconds:g} s")
                await self._availability.call("", wait)
            return task.result()
        finally:
            task.cancel()

    async def _absence(self) -> Unavailable | None:
        """Probe the service; return the error of an outage.  Concurrent calls share a probe."""
        loop = asyncio.get_running_loop()
        if self._client is None or loop.time() - self._answered < PROBE:
            return None
        holder = self._client.holder

        async def ask() -> None:
            with holder.aclient(ClientConnectionPoolType.SESSION) as client:
                await client.with_options(max_retries=0, timeout=PROBE).service.health_check()

        try:
            await holder.run_coroutine_threadsafe(ask())
        except tinker.APIError as error:
            if (away := _absent(error)) is not None:
                return away
        self._answered = loop.time()
        return None

    async def unload(self, model_id: str) -> None:
        """Unload the adapters of a model, if the service supports it."""
        if self._client is None:
            return
        holder = self._client.holder

        async def ask() -> None:
            with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
                about = {"model_id": model_id, "type": "unload_model"}
                await client.post("/api/v1/unload_model", body=about, cast_to=object)

        await _as_far_as_it_does(holder.run_coroutine_threadsafe(ask()))

    async def delete(self, path: str) -> None:
        """Delete a snapshot or a state, if the service supports it."""
        if self._client is not None:
            client = self._client.create_rest_client()
            await _as_far_as_it_does(client.delete_checkpoint_from_tinker_path_async(path))

    def close(self) -> None:
        """End the session; the service detects the missing heartbeat."""
        if self._client is not None:
            self._client.holder.close()  # type: ignore[no-untyped-call]


def said(error: BaseException) -> str:
    """Format an error of the SDK as one short line."""
    return errors.shortened(" ".join(f"{type(error).__name__}: {error}".split()).rstrip("."), LONGEST)


def _absent(error: BaseException | None) -> Unavailable | None:
    """Return the description of an outage in an error, or None."""
    if isinstance(error, tinker.APIStatusError):
        return Unavailable(said(error)) if error.status_code >= 500 else None
    return Unavailable(said(error)) if isinstance(error, tinker.APIConnectionError) else None


async def _as_far_as_it_does(answer: Awaitable[object]) -> None:
    """Await an optional call; failures are ignored, because the end of the session cleans up as well."""
    with contextlib.suppress(tinker.TinkerError, ValueError, TimeoutError):
        async with asyncio.timeout(PROBE):
            await answer


async def _awaited(answer: Awaitable[T]) -> T:
    return await answer
