"""Engines around other engines; they pass on the attributes of the inner engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from grpo_core.contracts.protocols import Engine
from grpo_core.contracts.records import Completion, GenerationRequest, Weights
from grpo_core.processes.aio import FairSemaphore, gather


class WrappedEngine(Engine):
    """An engine around another one; its attributes, such as ``metrics`` or ``dtype``, are the other's."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return await self.engine.generate(requests)

    async def update_weights(self, weights: Weights) -> None:
        await self.engine.update_weights(weights)

    async def aclose(self) -> None:
        await self.engine.aclose()


class LimitedEngine(WrappedEngine):
    """An engine behind a queue: a request waits here, oldest first, until one of ``requests`` places is free.

    Each request of a call takes one place, so a call may have more requests than places.
    """

    def __init__(self, engine: Engine, requests: int) -> None:
        super().__init__(engine)
        self._places = FairSemaphore(requests)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        answers = await gather([self._generate(request) for request in requests])
        return [completion for answer in answers for completion in answer]

    async def _generate(self, request: GenerationRequest) -> list[Completion]:
        async with self._places.take():
            return await self.engine.generate([request])


class BackgroundMetrics:
    """Metrics fetched in the background: each call returns the last answer and requests the next one.

    An engine uses it as its attribute ``metrics``.

    Args:
        ask: returns the metrics, or None if there are none now.  After an error the last answer stays.
    """

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, Mapping[str, float] | None]]) -> None:
        self._ask = ask
        self._asking: asyncio.Task[Mapping[str, float] | None] | None = None
        self._shown: Mapping[str, float] = {}
        self._closed = False

    def __call__(self) -> Mapping[str, float]:
        asking = self._asking
        if asking is not None and asking.done() and not asking.cancelled() and asking.exception() is None:
            self._shown = asking.result() or self._shown
        if not self._closed and (asking is None or asking.done()):
            self._asking = asyncio.create_task(self._ask())
        return self._shown

    async def aclose(self) -> None:
        """Stop asking."""
        self._closed = True
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)


def engine_metrics(engine: Engine) -> Mapping[str, float]:
    """Return an engine's own metrics; empty if it has none."""
    read: Callable[[], Mapping[str, float]] = getattr(engine, "metrics", dict)
    return read()


def metrics_of(engines: Mapping[str, Engine]) -> dict[str, float]:
    """Return the metrics of engines by their sections, as ``engine_NAME/ENGINE``.

    ENGINE is ``engine`` or ``validation_engine``; in a pool its number follows, such as ``engine_0``.
    """
    found: dict[str, float] = {}
    for section, engine in engines.items():
        of = section.replace(".", "_")
        for name, value in engine_metrics(engine).items():
            metric, _, member = name.partition("/")
            found[f"engine_{metric}/{of.removesuffix('engine')}{member or 'engine'}"] = value
    return found
