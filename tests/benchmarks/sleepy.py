"""An engine that only waits: what is left is what the rest of the program does."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from grpo_core.contracts.records import Completion, EngineSetup, GenerationRequest, Weights


class Sleepy:
    """Decodes ``rows`` requests at once, each for as long as it has tokens.

    Args:
        rows: slots.
        seconds_per_token: 0 answers at once.
    """

    def __init__(self, setup: EngineSetup, *, rows: int = 8, seconds_per_token: float = 0.0) -> None:
        self._rows = asyncio.Semaphore(rows)
        self._seconds = seconds_per_token
        self._version = -1

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        return list(await asyncio.gather(*map(self._one, requests)))

    async def _one(self, request: GenerationRequest) -> Completion:
        n = request.max_tokens
        async with self._rows:
            await asyncio.sleep(self._seconds * n)
        return Completion(
            token_ids=(5,) * n, logprobs=(-1.0,) * n, versions=(self._version,) * n, finish_reason="length"
        )

    async def update_weights(self, weights: Weights) -> None:
        self._version = weights.version

    async def aclose(self) -> None:
        return None
