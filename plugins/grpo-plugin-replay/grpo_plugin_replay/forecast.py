"""Forecasts: runs of the real pipeline with simulated parts, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from attrs import evolve, frozen

from grpo_core import ConfigError, Engine, EngineSetup, GrpoError, Prompt, events
from grpo_core.app import making
from grpo_core.contracts.playing import derive_seed
from grpo_core.data.loaders import IndexedLoader
from grpo_core.data.samplers import PromptStream
from grpo_core.engines.wrapped import LimitedEngine
from grpo_core.kit import Config, PluginHost, reported_to
from grpo_core.loop.agreement import Tolerance
from grpo_core.loop.pipeline import Checks, Pipeline
from grpo_core.loop.rollout import RolloutRequest, play
from grpo_core.testing import clock
from grpo_plugin_replay.times import Times
from grpo_plugin_replay.world import (
    PlannedEngine,
    PlannedEnvironment,
    PlannedRenderer,
    PlannedTrainer,
    Plays,
)

PROMPTS = 1000
"""Number of prompts of a task."""
WARM_UP = 2
"""Number of first steps excluded from means: the pipeline fills, and a real trainer warms up."""


def fewest_steps(max_staleness: int) -> int:
    """Return the number of steps below which a forecast is dominated by the groups of the warm-up.

    The groups of ``max_staleness + 1`` steps start at the same time, and may finish at the same time: one of
    these steps waits for them, and the others do not.
    """
    return WARM_UP + 2 * (max_staleness + 1)


@frozen(kw_only=True)
class Forecast:
    """Times and shares of a run: means over its steps after the warm-up."""

    seconds_per_step: float
    overlap: float
    """Share of the time in which generation and training were both busy."""
    generating: float
    """Share of the time in which rollouts ran."""
    training: float
    """Share of the time in which the trainer computed a step."""
    waiting: float
    """Share of the time in which training waited for groups."""
    staleness_mean: float
    staleness_max: float
    tokens_per_second: float
    rollouts_per_second: float
    """Trained rows per second: one for each rollout with a training signal, or for each of its segments."""
    skipped: float
    """Number of prompts that were skipped after all attempts failed."""


def summarise(steps: Sequence[Mapping[str, float]]) -> Forecast:
    """Return the means of the metrics over a run's steps."""
    counted = steps[WARM_UP:] if len(steps) > 2 * WARM_UP else steps

    def mean(name: str) -> float:
        return fmean(step.get(name, 0.0) for step in counted)

    seconds = max(mean("time/step"), 1e-9)
    return Forecast(
        seconds_per_step=mean("time/step"),
        overlap=fmean(step["overlap"] * step["time/step"] for step in counted) / seconds,
        generating=min(mean("time/generate") / seconds, 1.0),
        training=mean("time/train") / seconds,
        waiting=mean("time/wait_for_groups") / seconds,
        staleness_mean=mean("staleness_mean"),
        staleness_max=max(step.get("staleness_max", 0.0) for step in steps),
        tokens_per_second=mean("tokens_per_second/generation"),
        rollouts_per_second=mean("rows") / seconds,
        skipped=steps[-1].get("buffer/skipped", 0.0),
    )


def forecast(
    config: Config,
    times: Times,
    host: PluginHost,
    *,
    seed: int = 0,
    held_out: int = 0,
    emit: Callable[[Any], None] = lambda event: None,
) -> Forecast:
    """Run the pipeline of a configuration in virtual time.

    Args:
        held_out: number of rollouts of a validation.
        emit: receives the events of the run inside of the virtual event loop.

    Raises ConfigError if the simulated run fails, for example because rollouts exceed a deadline.
    """
    steps: list[Mapping[str, float]] = []

    def receive(event: Any) -> None:
        if isinstance(event, events.StepEnded):
            steps.append(event.metrics)
        emit(event)

    async def save(step: int, failure: Any) -> Any:
        await asyncio.sleep(times.checkpoint.cut)

        async def written() -> Path:
            await asyncio.sleep(times.checkpoint.write)
            return Path(f"step-{step:06d}")

        return written

    plays = Plays(times.rollout, seed=seed, group_size=config.rollout.group_size)
    tasks = list(config.tasks) or ["task"]
    environments = {task: PlannedEnvironment(times.environment, plays) for task in tasks}
    loaders = {}
    for task in tasks:
        offered = [Prompt(messages="-", id=str(i), environment=task) for i in range(PROMPTS)]
        loaders[task] = IndexedLoader(task, offered, seed=seed)
    renderer, sampling = PlannedRenderer(times.rollout.prompt_tokens), making.sampling_params(config.rollout)
    unfiltered = evolve(config, filters={})  # filters read tokens, which are not simulated
    sampler = making.sampler(config, host)

    async def story() -> None:
        engine = _engine(config, host, lambda: PlannedEngine(times.engine, plays))

        async def validate(version: int) -> dict[str, dict[str, float]]:
            requests = [
                RolloutRequest(
                    prompt=Prompt(messages="-", id=str(i), environment=tasks[i % len(tasks)]),
                    seed=derive_seed(seed, version, i),
                    group=f"validation {version} {i}",
                )
                for i in range(held_out)
            ]
            await play(
                requests,
                engine=engine,
                environments=environments,
                renderer=renderer,
                sampling=sampling,
                deadline=config.validation.deadline,
            )
            return {}

        pipeline = Pipeline(
            buffer=making.buffer(config),
            prompts=PromptStream(sampler=sampler, loaders=loaders, name=config.sampler.name),
            engine=engine,
            playing=making.playing(config.rollout, environments, renderer, seed=seed),
            learning=making.learning(unfiltered, making.loss(config.loss, host), host),
            trainer=PlannedTrainer(times.trainer, seed=seed),
            checks=Checks(observe_attempt=making.budgets(config, environments)),
            schedule=evolve(making.schedule(config), time_limit=None),
            emit=receive,
            validate=validate if held_out else None,
            save=save if config.checkpoint.every else None,
        )
        with reported_to(lambda incident: None):  # incidents are part of the simulation
            try:
                await pipeline.run()
            finally:
                await engine.aclose()

    try:
        clock.run(story(), horizon=float("inf"))
    except GrpoError as error:
        raise ConfigError(f"the simulated run fails after {len(steps)} steps: {error}") from error
    return summarise(steps)


def _engine(config: Config, host: PluginHost, make: Callable[[], Engine]) -> Engine:
    """Return the engine of the configuration, or its pool of engines."""

    def one() -> Engine:
        limit = config.engine.max_requests
        return LimitedEngine(make(), limit) if limit else make()

    if config.engine.workers == 1:
        return one()
    make_pool = host.find("engine", "pool").load()
    pool: Engine = make_pool(lambda *_: one(), config.engine, EngineSetup(model=""), [{}], Tolerance())
    return pool


def for_steps(config: Config, steps: int) -> Config:
    """Return the configuration with another number of steps, without keys that override it."""
    trainer = evolve(config.trainer, steps=steps, epochs=0.0, time_limit=0.0, stop_when="")
    return evolve(config, trainer=trainer)
