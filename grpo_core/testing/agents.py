"""Plays an agent against a model that always says the same, to find out what it does."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from random import Random

from grpo_core.agents.server import AgentServer
from grpo_core.environments.pool import EnvironmentWorker
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.records import GenerationRequest, Prompt, Rollout, Weights
from grpo_core.testing.fakes import FakeEngine, FakeRenderer

SECONDS = 60.0
"""Deadline of a rollout."""
TURNS = 20
"""Largest number of completions of a rollout."""


async def play_agent(environment: EnvironmentWorker, plays: Sequence[tuple[Prompt, str]]) -> list[Rollout]:
    """Let an agent play prompts, each with a model that always gives the same reply.

    A token is a character.
    """
    server = AgentServer()
    await server.start()
    environment.agents = server
    try:
        rollouts = []
        for number, (prompt, reply) in enumerate(plays):
            engine = FakeEngine(reply=partial(_says, reply), latency=lambda rng: 0.0, update_seconds=0.0)
            await engine.update_weights(Weights(version=0, location="", nbytes=0, tensors=()))
            rollouts += await play(
                [RolloutRequest(prompt=prompt, seed=number, group=str(number))],
                engine=engine,
                environments={prompt.environment: environment},
                renderer=FakeRenderer(),
                sampling=SamplingParams(temperature=1.0, max_tokens=100_000, max_turns=TURNS),
                deadline=SECONDS,
            )
        return rollouts
    finally:
        environment.agents = None
        await server.aclose()


def _says(reply: str, request: GenerationRequest, rng: Random) -> str:
    return reply
