"""An engine that is given a limited number of requests at the same time."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_core.aio import Slots, gather
from grpo_core.engines.wrapped import WrappedEngine
from grpo_core.protocols import Engine
from grpo_core.records import Completion, GenerationRequest


class LimitedEngine(WrappedEngine):
    """An engine behind a queue: a request waits here, oldest first, until one of ``requests`` places is free.

    The requests of one call take a place each, so a call with more requests than places is answered, too.
    """

    def __init__(self, engine: Engine, requests: int) -> None:
        super().__init__(engine)
        self._places = Slots(requests)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        answers = await gather([self._generate(request) for request in requests])
        return [completion for answer in answers for completion in answer]

    async def _generate(self, request: GenerationRequest) -> list[Completion]:
        async with self._places.take():
            return await self.engine.generate([request])
