"""An engine that is given a limited number of requests at the same time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_core.aio import Slots, gather
from grpo_core.engines.members import measured
from grpo_core.protocols import Engine
from grpo_core.records import Completion, GenerationRequest, Weights


class LimitedEngine:
    """An engine behind a queue: a request waits here, oldest first, until one of ``requests`` places is free.

    The requests of one call take a place each, so a call with more requests than places is answered, too.
    """

    def __init__(self, engine: Engine, requests: int) -> None:
        self._engine = engine
        self._places = Slots(requests)

    @property
    def dtype(self) -> str:
        """The dtype in which the engine computes, if it says so."""
        return str(getattr(self._engine, "dtype", ""))

    @property
    def positions(self) -> int:
        """The engine's largest number of tokens of a prompt with its completion, if it has said so."""
        return int(getattr(self._engine, "positions", 0))

    def metrics(self) -> Mapping[str, float]:
        """Return the engine's metrics; none if it has none."""
        return measured(self._engine)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        answers = await gather([self._generate(request) for request in requests])
        return [completion for answer in answers for completion in answer]

    async def update_weights(self, weights: Weights) -> None:
        await self._engine.update_weights(weights)

    async def aclose(self) -> None:
        await self._engine.aclose()

    async def _generate(self, request: GenerationRequest) -> list[Completion]:
        async with self._places.take():
            return await self._engine.generate([request])
