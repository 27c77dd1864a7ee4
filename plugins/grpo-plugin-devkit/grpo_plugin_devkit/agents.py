"""Plays an environment's agent against a model with fixed replies."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from random import Random
from typing import Any, TypeVar

from grpo_core import Completion, Engine, GenerationRequest, PlayerSetup, Prompt, Rollout, Weights
from grpo_core.kit import EnvironmentWorker, PluginHost, aio
from grpo_core.testing import FakeEngine, play_rollouts

SECONDS = 60.0
"""Deadline of a rollout."""
TURNS = 20
"""Largest number of completions of a rollout."""
PATIENCE = 3.0
"""Seconds that a reply waits for requests of the other rollouts."""

E = TypeVar("E", bound=FakeEngine)
Plays = Sequence[tuple[Prompt, str]]
"""Prompts, each with the model's reply to all requests of its rollout."""


async def play_agent(environment: EnvironmentWorker, plays: Plays) -> list[Rollout]:
    """Let an agent play prompts one after another.

    A token is a character.
    """
    async with _served(environment, plays, FakeEngine) as engine:
        return [await _rollout(environment, engine, prompt, index) for index, (prompt, _) in enumerate(plays)]


async def play_side_by_side(
    environment: EnvironmentWorker, plays: Plays, order: Sequence[int]
) -> tuple[list[Rollout], int]:
    """Let an agent play prompts concurrently: replies wait until each rollout has sent a request or ended.

    Returns the rollouts, and the largest number of rollouts that waited at the same time.  Raises PluginError
    if the agent uses the key of another rollout.

    Args:
        order: the play of each rollout; those of one play are of one group.
    """
    async with _served(environment, plays, _InStep) as engine:
        engine.playing = set(range(len(order)))

        async def one(number: int, index: int) -> Rollout:
            try:
                seat: Any = _Seat(engine, number)
                return await _rollout(environment, seat, plays[index][0], number, str(index))
            finally:
                engine.ended(number)

        return await aio.gather(one(*each) for each in enumerate(order)), engine.most


@contextlib.asynccontextmanager
async def _served(environment: EnvironmentWorker, plays: Plays, kind: type[E]) -> AsyncIterator[E]:
    """Serve a model with the replies of the plays; the group of a request is the index of its play."""
    replies: Mapping[str, str] = {str(index): reply for index, (_, reply) in enumerate(plays)}

    def reply_of(request: GenerationRequest, rng: Random) -> str:
        return replies[request.group]

    setup = PlayerSetup(tasks={"check": True})
    player = PluginHost.discover().make("player", "agents", setup)
    await player.start()
    environment.player = player
    try:
        engine = kind(reply=reply_of, latency=lambda rng: 0.0, update_seconds=0.0)
        await engine.update_weights(Weights(version=0, location="", nbytes=0, tensors=()))
        yield engine
    finally:
        environment.player = None
        await player.aclose()


async def _rollout(
    environment: EnvironmentWorker, engine: Engine, prompt: Prompt, index: int, group: str = ""
) -> Rollout:
    (rollout,) = await play_rollouts(
        [prompt],
        engine=engine,
        environment=environment,
        deadline=SECONDS,
        first=index,
        group=group,
        max_tokens=100_000,
        max_turns=TURNS,
    )
    return rollout


class _Seat:
    """The engine as one rollout sees it: a request is known by the rollout at whose address it arrives."""

    def __init__(self, engine: _InStep, rollout: int) -> None:
        self._engine, self._rollout = engine, rollout

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        await self._engine.wait(self._rollout)
        return await self._engine.generate(requests)


class _InStep(FakeEngine):
    """An engine that replies when all running rollouts have sent a request, or after ``PATIENCE``.

    After the first timeout with a single request, rollouts are assumed to run one after another, and replies
    no longer wait.
    """

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.playing: set[int] = set()
        self.most = 0
        """Largest number of rollouts that waited at the same time."""
        self._waiting: set[int] = set()
        self._go = asyncio.Event()
        self._patience = PATIENCE

    async def wait(self, rollout: int) -> None:
        """Wait until all rollouts that play have sent a request."""
        self._waiting.add(rollout)
        self.most = max(self.most, len(self._waiting))
        go = self._go
        self._step()
        try:
            async with asyncio.timeout(self._patience):
                await go.wait()
        except TimeoutError:
            self._patience = 0.0 if self.most < 2 else self._patience
            self._waiting.discard(rollout)

    def ended(self, rollout: int) -> None:
        self.playing.discard(rollout)
        self._step()

    def _step(self) -> None:
        if self.playing <= self._waiting:
            self._waiting.clear()
            self._go.set()
            self._go = asyncio.Event()
