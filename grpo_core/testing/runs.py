"""Rollouts, a small run and a validation with fakes, on the real pipeline; a canary check."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from grpo_core.contracts.events import Event, GroupsReady, Validated, ValidationPlayed
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.protocols import Engine, Trainer, ValidationStrategy
from grpo_core.contracts.records import Group, Prompt, Rollout, Weights
from grpo_core.loop import canary
from grpo_core.loop.advantages import group as group_advantages
from grpo_core.loop.agreement import Tolerance
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.pipeline import Learning, Pipeline, Playing, Schedule, Validate
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.loop.versions import Interval
from grpo_core.testing import clock
from grpo_core.testing.fakes import (
    FakeEngine,
    FakeEnvironment,
    FakePrompts,
    FakeRenderer,
    FakeTrainer,
    prompts,
)
from grpo_core.validation.runner import Context, Results, run_strategy


async def play_rollouts(
    some: Sequence[Prompt],
    *,
    engine: Engine,
    environment: Any,
    deadline: float,
    first: int = 0,
    group: str = "",
    **limits: Any,
) -> list[Rollout]:
    """Play a rollout of each prompt with an engine whose tokens are characters.

    Args:
        some: the prompts, one of each rollout.
        engine: with its weights loaded.
        environment: as in a run; its ``player`` plays.
        deadline: seconds for each rollout.
        first: seed of the first rollout, and the group of its requests; the others count up from it.
        group: group of all requests, instead.
        limits: fields of ``rollout``, as ``max_tokens`` and ``max_turns``.
    """
    return await play(
        [
            RolloutRequest(prompt=prompt, seed=seed, group=group or str(seed))
            for seed, prompt in enumerate(some, first)
        ],
        engine=engine,
        environments={prompt.environment: environment for prompt in some},
        renderer=FakeRenderer(),
        sampling=SamplingParams(temperature=1.0, **limits),
        deadline=deadline,
    )


async def fake_run(
    stream: Iterator[Prompt],
    *,
    engine: Engine,
    environments: Mapping[str, EnvironmentClient],
    trainer: Trainer,
    steps: int = 3,
    prompts_per_step: int = 2,
    max_tokens: int = 8,
    validate: Validate | None = None,
    emit: Callable[[Event], None] = lambda event: None,
) -> None:
    """Train with the real pipeline, in order, and validate every other version.

    Args:
        stream: its prompts are drawn in turn.
        environments: by task.
        validate: measures a version.
        emit: receives the events.
    """
    buffer: Buffer[Prompt, Group] = Buffer(
        prompts_per_step=prompts_per_step, max_staleness=1, num_steps=steps, policy="in_order"
    )
    await Pipeline(
        buffer=buffer,
        prompts=FakePrompts(lambda request: [next(stream) for _ in range(request.expected_prompts)]),
        engine=engine,
        playing=Playing(
            environments=environments,
            renderer=FakeRenderer(),
            sampling=SamplingParams(temperature=1.0, max_tokens=max_tokens),
            group_size=4,
        ),
        learning=Learning(advantages=group_advantages),
        trainer=trainer,
        schedule=Schedule(validations=[Interval(2)], in_flight_updates=False),
        validate=validate,
        emit=emit,
    ).run()


def a_run() -> list[Event]:
    """Return the events of a run of three steps; the groups of the last one are validated, too."""
    events: list[Event] = []
    run = fake_run(
        iter(prompts(100)),
        engine=FakeEngine(),
        environments={"task": FakeEnvironment()},
        trainer=FakeTrainer(),
        emit=events.append,
    )
    clock.run(run)
    groups = [event.groups for event in events if isinstance(event, GroupsReady)][-1]
    return [
        *events,
        ValidationPlayed(step=3, version=3, groups=groups),
        Validated(step=3, version=3, results={"task": {"reward": 0.5, "accuracy": 0.5}}),
    ]


async def measured_by(
    strategy: ValidationStrategy,
    held_out: Mapping[str, Sequence[Prompt]],
    *,
    engine: Engine,
    environments: Mapping[str, EnvironmentClient],
    version: int = 0,
    **limits: Any,
) -> Results:
    """Return a validation strategy's results for a version with these prompts, by task.

    Args:
        limits: fields of ``rollout``, as ``max_tokens`` and ``max_turns``.
    """
    context = Context(
        version=version,
        prompts=held_out,
        engine=engine,
        environments=environments,
        renderer=FakeRenderer(),
        sampling=SamplingParams(temperature=1.0, **limits),
        deadline=1e5,
    )
    return await run_strategy(type(strategy).__name__, strategy, context)


async def check_canary(engine: Engine, weights: Weights, *, tolerance: float) -> None:
    """Check an engine against the canary of weights, as a run does.  Raises WeightSyncError."""
    await canary.verify(engine, weights, tolerance=Tolerance(tolerance), deadline=None)
