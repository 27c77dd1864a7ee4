"""Rollouts and a small run with fakes, on the real pipeline; the comparison of an engine with a canary."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_core.events import Event, GroupsReady, Validated, ValidationPlayed
from grpo_core.loop import canary
from grpo_core.loop.advantages import group as group_advantages
from grpo_core.loop.agreement import Tolerance
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.pipeline import Learning, Pipeline, Playing, Schedule
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.protocols import Engine
from grpo_core.records import Group, Prompt, Rollout, Weights
from grpo_core.testing import clock
from grpo_core.testing.fakes import (
    FakeEngine,
    FakeEnvironment,
    FakePrompts,
    FakeRenderer,
    FakeTrainer,
    prompts,
)


async def play_rollouts(
    some: Sequence[Prompt],
    *,
    engine: Engine,
    environment: Any,
    deadline: float,
    first: int = 0,
    **limits: Any,
) -> list[Rollout]:
    """Play a rollout of each prompt with an engine whose tokens are characters.

    Args:
        some: the prompts, one of each rollout.
        engine: has its weights already.
        environment: as a run has it; its ``player`` plays.
        deadline: seconds for each rollout.
        first: seed of the first rollout, and the group of its requests; the others have the numbers after it.
        limits: fields of ``rollout``, as ``max_tokens`` and ``max_turns``.
    """
    return await play(
        [
            RolloutRequest(prompt=prompt, seed=seed, group=str(seed))
            for seed, prompt in enumerate(some, first)
        ],
        engine=engine,
        environments={prompt.environment: environment for prompt in some},
        renderer=FakeRenderer(),
        sampling=SamplingParams(temperature=1.0, **limits),
        deadline=deadline,
    )


def a_run() -> list[Event]:
    """Return the events of a run of three steps; the groups of the last one are validated, too."""
    events: list[Event] = []
    stream = iter(prompts(100))

    async def story() -> None:
        buffer: Buffer[Prompt, Group] = Buffer(prompts_per_step=2, max_staleness=1, num_steps=3)
        await Pipeline(
            buffer=buffer,
            prompts=FakePrompts(lambda request: [next(stream) for _ in range(request.expected_prompts)]),
            engine=FakeEngine(),
            playing=Playing(
                environments={"task": FakeEnvironment()},
                renderer=FakeRenderer(),
                sampling=SamplingParams(temperature=1.0, max_tokens=8),
                group_size=4,
            ),
            learning=Learning(advantages=group_advantages),
            trainer=FakeTrainer(),
            schedule=Schedule(),
            emit=events.append,
        ).run()

    clock.run(story())
    groups = [event.groups for event in events if isinstance(event, GroupsReady)][-1]
    return [
        *events,
        ValidationPlayed(step=3, version=3, groups=groups),
        Validated(step=3, version=3, results={"task": {"reward": 0.5, "accuracy": 0.5}}),
    ]


async def check_canary(engine: Engine, weights: Weights, *, tolerance: float) -> None:
    """Compare an engine with the canary of weights, as a run does.  Raises WeightSyncError."""
    await canary.verify(engine, weights, tolerance=Tolerance(tolerance), deadline=None)
