"""Validation on a separate engine, during training."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from attrs import define, field

from grpo_core.contracts.events import Event, Validated
from grpo_core.contracts.protocols import Engine
from grpo_core.contracts.records import Weights
from grpo_core.engines.wrapped import WrappedEngine
from grpo_core.loop import canary
from grpo_core.loop.agreement import Tolerance
from grpo_core.validation.runner import Results


class WeightsTrackingEngine(WrappedEngine):
    """An engine that remembers the last weights that it was sent.

    Args:
        engine: the engine.
        check: is called when the engine holds its first weights.
    """

    weights: Weights | None = None

    def __init__(self, engine: Engine, check: Callable[[Weights], object] = lambda weights: None) -> None:
        super().__init__(engine)
        self._check = check

    async def update_weights(self, weights: Weights) -> None:
        await super().update_weights(weights)
        if self.weights is None:
            self._check(weights)
        self.weights = weights


@define(kw_only=True, eq=False)
class DedicatedValidator:
    """Measures on an engine that training does not use.

    Training waits until that engine holds the weights, and continues while it generates.  Versions are
    measured one after another.

    Results are emitted as they arrive; the results of ``last`` are returned, since training has ended.
    ``watch`` measures: it has to run concurrently with the pipeline, and raises errors.
    """

    measure: Callable[[int], Awaitable[Results]]
    engine: Engine
    trained: WeightsTrackingEngine
    emit: Callable[[Event], None]
    last: int
    pauses: bool = False
    """Training waits for the results as well."""
    deadline: float
    """Seconds for the weight update, and again for the canary."""
    canary_tolerance: Tolerance
    _due: asyncio.Queue[int] = field(init=False, factory=asyncio.Queue)

    async def __call__(self, version: int) -> Results | None:
        await self._due.join()
        weights = self.trained.weights
        assert weights is not None
        assert weights.version == version
        key = "validation.engine.deadline"
        await canary.update(self.engine, weights, deadline=self.deadline, key=key)
        await canary.verify(self.engine, weights, tolerance=self.canary_tolerance, deadline=self.deadline)
        if self.pauses or version == self.last:
            return await self.measure(version)
        self._due.put_nowait(version)
        return None

    async def watch(self) -> None:
        while True:
            version = await self._due.get()
            results = await self.measure(version)
            self.emit(Validated(step=version, version=version, results=results))
            self._due.task_done()
