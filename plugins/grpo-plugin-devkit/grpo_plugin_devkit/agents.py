"""Plays an agent against a model that always says the same, to find out what it does."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from random import Random

from attrs import define, field

from grpo_core import Completion, Engine, GenerationRequest, PlayerSetup, Prompt, Rollout, Weights
from grpo_core.kit import EnvironmentWorker, PluginHost
from grpo_core.testing import FakeEngine, play_rollouts

SECONDS = 60.0
"""Deadline of a rollout."""
TURNS = 20
"""Largest number of completions of a rollout."""
PATIENCE = 3.0
"""Seconds for which a reply waits for the requests of other rollouts."""

Plays = Sequence[tuple[Prompt, str]]
"""Prompts, each with what the model says to everything that its rollout asks."""


async def play_agent(environment: EnvironmentWorker, plays: Plays) -> list[Rollout]:
    """Let an agent play prompts, one after another.

    A token is a character.
    """
    async with _served(environment, plays) as engine:
        return [await _rollout(environment, engine, prompt, place) for place, (prompt, _) in enumerate(plays)]


async def play_side_by_side(environment: EnvironmentWorker, plays: Plays) -> tuple[list[Rollout], int]:
    """Let an agent play prompts at the same time: none has a reply before each has asked, or ended.

    Returns the rollouts, and the largest number of them that have asked before one had a reply.
    """
    async with _served(environment, plays) as engine:
        steps = _InStep(engine, {str(place) for place in range(len(plays))})

        async def one(place: int, prompt: Prompt) -> Rollout:
            try:
                return await _rollout(environment, steps, prompt, place)
            finally:
                steps.ended(str(place))

        rollouts = await asyncio.gather(*(one(place, prompt) for place, (prompt, _) in enumerate(plays)))
        return rollouts, steps.most


@contextlib.asynccontextmanager
async def _served(environment: EnvironmentWorker, plays: Plays) -> AsyncIterator[FakeEngine]:
    """Serve a model that says what the plays say; the group of a request is the place of its play."""
    replies: Mapping[str, str] = {str(place): reply for place, (_, reply) in enumerate(plays)}

    def says(request: GenerationRequest, rng: Random) -> str:
        return replies[request.group]

    setup = PlayerSetup(tasks={"check": True})
    player = PluginHost.discover().make("player", "agents", setup)
    await player.start()
    environment.player = player
    try:
        engine = FakeEngine(reply=says, latency=lambda rng: 0.0, update_seconds=0.0)
        await engine.update_weights(Weights(version=0, location="", nbytes=0, tensors=()))
        yield engine
    finally:
        environment.player = None
        await player.aclose()


async def _rollout(environment: EnvironmentWorker, engine: Engine, prompt: Prompt, place: int) -> Rollout:
    (rollout,) = await play_rollouts(
        [prompt],
        engine=engine,
        environment=environment,
        deadline=SECONDS,
        first=place,
        max_tokens=100_000,
        max_turns=TURNS,
    )
    return rollout


@define(eq=False)
class _InStep:
    """An engine that replies when each rollout that plays has asked, or after ``PATIENCE``.

    If one waits in vain, they play one after another, and nothing waits any more.
    """

    engine: FakeEngine
    playing: set[str]
    most: int = field(init=False, default=0)
    """Largest number of rollouts that have waited at the same time."""
    _waiting: set[str] = field(init=False, factory=set)
    _go: asyncio.Event = field(init=False, factory=asyncio.Event)
    _patience: float = field(init=False, default=PATIENCE)

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        self._waiting.add(requests[0].group)
        self.most = max(self.most, len(self._waiting))
        go = self._go
        self._step()
        try:
            async with asyncio.timeout(self._patience):
                await go.wait()
        except TimeoutError:
            self._patience = 0.0 if self.most < 2 else self._patience
            self._waiting.discard(requests[0].group)
        return await self.engine.generate(requests)

    async def update_weights(self, weights: Weights) -> None:
        await self.engine.update_weights(weights)

    async def aclose(self) -> None:
        await self.engine.aclose()

    def ended(self, group: str) -> None:
        self.playing.discard(group)
        self._step()

    def _step(self) -> None:
        if self.playing <= self._waiting:
            self._waiting.clear()
            self._go.set()
            self._go = asyncio.Event()
