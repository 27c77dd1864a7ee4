"""A forecast: a run of the real pipeline with planned parts, on virtual time."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from attrs import evolve, frozen

from grpo_core.app.parts import (
    dynamic_sampling,
    make_advantages,
    make_buffer,
    make_sampler,
    make_schedule,
    make_shaping,
    rollout_places,
    sampling_params,
)
from grpo_core.config import Config
from grpo_core.data.samplers import PromptStream
from grpo_core.engines.limited import LimitedEngine
from grpo_core.engines.pool import EnginePool
from grpo_core.errors import ConfigError, GrpoError
from grpo_core.events import Event, StepEnded
from grpo_core.incidents import reported_to
from grpo_core.loop.endings import Failure
from grpo_core.loop.pipeline import Pipeline, Written
from grpo_core.loop.rollout import LostBudget, RolloutRequest, derive_seed, play
from grpo_core.planning.outcomes import Outcomes
from grpo_core.planning.times import Times
from grpo_core.planning.world import (
    VALIDATION,
    PlannedEngine,
    PlannedEnvironment,
    PlannedLoader,
    PlannedRenderer,
    PlannedTrainer,
    Plays,
    SharedCores,
)
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import Engine
from grpo_core.records import Prompt, Rollout
from grpo_core.testing.clock import run

WARM_UP = 2
"""Steps at the beginning that do not count in means: the pipeline is empty, and a real trainer warms up."""


def fewest_steps(max_staleness: int) -> int:
    """Return the number of steps below which a forecast is mostly of the groups of the warm-up.

    The groups of ``max_staleness + 1`` steps are begun at the same time, and may be finished at the same
    time: one of so many steps waits for them, and the others do not.
    """
    return WARM_UP + 2 * (max_staleness + 1)


@frozen(kw_only=True)
class Forecast:
    """The seconds and shares of a run, as means over its steps without the first two."""

    seconds_per_step: float
    overlap: float
    """Share of the time in which the busier side, generation or training, was busy."""
    generating: float
    """Share of the time in which rollouts were played."""
    training: float
    """Share of the time in which the trainer computed a step."""
    waiting: float
    """Share of the time in which training waited for groups."""
    staleness_mean: float
    staleness_max: float
    tokens_per_second: float
    rollouts_per_second: float
    """Rows that were trained in a second: one for each rollout with a learning signal, or for each of its
    segments."""
    skipped: float
    """Number of prompts that were skipped because no attempt at them succeeded."""


def summarise(steps: Sequence[Mapping[str, float]]) -> Forecast:
    """Return the means of the metrics of a run's steps, whether it was simulated or not."""
    counted = steps[WARM_UP:] if len(steps) > 2 * WARM_UP else steps

    def mean(name: str) -> float:
        return fmean(step.get(name, 0.0) for step in counted)

    seconds = max(mean("time/step"), 1e-9)
    return Forecast(
        seconds_per_step=mean("time/step"),
        overlap=fmean(_overlap(step) for step in counted),
        generating=min(mean("time/generate") / seconds, 1.0),
        training=mean("time/train") / seconds,
        waiting=mean("time/wait_for_groups") / seconds,
        staleness_mean=mean("staleness_mean"),
        staleness_max=max(step.get("staleness_max", 0.0) for step in steps),
        tokens_per_second=mean("tokens_per_second/generation"),
        rollouts_per_second=mean("rows") / seconds,
        skipped=steps[-1].get("buffer/skipped", 0.0),
    )


def _overlap(step: Mapping[str, float]) -> float:
    return step.get("overlap", 0.0)


def forecast(
    config: Config,
    times: Times,
    outcomes: Outcomes,
    host: PluginHost,
    *,
    seed: int = 0,
    held_out: int = 0,
    emit: Callable[[Event], None] = lambda event: None,
) -> Forecast:
    """Run the pipeline that a configuration describes, on virtual time.

    Args:
        held_out: number of rollouts of a validation.
        emit: receives the events of the run while the virtual event loop runs.

    Raises ConfigError if the simulated run fails, such as by a deadline that rollouts cannot keep.
    """
    steps: list[Mapping[str, float]] = []

    def receive(event: Event) -> None:
        if isinstance(event, StepEnded):
            steps.append(event.metrics)
        emit(event)

    async def story() -> None:
        world = _World(config, times, outcomes, seed=seed, held_out=held_out)
        with reported_to(lambda incident: None):  # what is tried again counts in the times
            try:
                await world.pipeline(host, receive).run()
            finally:
                await world.engine.aclose()

    try:
        with _rare_collections():
            run(story(), horizon=float("inf"))
    except GrpoError as error:
        raise ConfigError(f"the simulated run fails after {len(steps)} steps: {error}") from error
    return summarise(steps)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for circles of objects less often: a simulated run makes many objects and few circles.

    Looking as often as usual takes an eighth of a simulation's time.
    """
    usual = gc.get_threshold()
    gc.set_threshold(100_000, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)


class _World:
    """The parts of a simulated run."""

    def __init__(self, config: Config, times: Times, outcomes: Outcomes, *, seed: int, held_out: int) -> None:
        self._config, self._times, self._seed, self._held_out = config, times, seed, held_out
        plays = Plays(
            outcomes,
            seed=seed,
            group_size=config.rollout.group_size,
            groups=config.trainer.steps * config.trainer.prompts_per_step,
        )
        self._cores = SharedCores(times.machine.slowdown)
        self.engine = _engine(config, times, plays, self._cores)
        self._tasks = list(config.tasks) or ["task"]
        self._environments = {task: PlannedEnvironment(times.environment, plays) for task in self._tasks}
        self._renderer = PlannedRenderer(outcomes.prompt_tokens)
        self._sampling = sampling_params(config.rollout)
        outstanding = (config.pipeline.max_staleness + 1) * config.trainer.prompts_per_step
        self._lost = LostBudget(outstanding * config.rollout.group_size * (config.rollout.max_retries + 1))

    def pipeline(self, host: PluginHost, emit: Callable[[Event], None]) -> Pipeline:
        """Make the pipeline as a run's configuration describes it."""
        config = self._config
        stream = self._stream(host)
        step = config.trainer.prompts_per_step
        return Pipeline(
            buffer=make_buffer(config.trainer, config.pipeline, config.rollout),
            draw=stream.draw,
            passed_over=stream.passed_over,
            observe=stream.observe,
            untrained=stream.untrained,
            engine=self.engine,
            trainer=PlannedTrainer(self._times.trainer, self._cores, seed=self._seed),
            environments=self._environments,
            renderer=self._renderer,
            sampling=self._sampling,
            group_size=config.rollout.group_size,
            places=rollout_places(config.rollout),
            advantages=make_advantages(config.advantage, host),
            all_rows=config.loss.all_rows,
            shaping=make_shaping(config.shaping, max_tokens=config.rollout.max_tokens),
            dynamic=dynamic_sampling(config.dynamic_sampling, {}, host, prompts_per_step=step),
            seed=self._seed,
            emit=emit,
            observe_attempt=self._observe_attempt,
            schedule=make_schedule(
                rollout=config.rollout,
                engine=config.engine,
                trainer=config.trainer,
                pipeline=config.pipeline,
                validation=config.validation,
                checkpoint=config.checkpoint,
            ),
            validate=self._validate if self._held_out else None,
            save=self._save if config.checkpoint.every else None,
        )

    def _stream(self, host: PluginHost) -> PromptStream:
        config = self._config
        weights = {name: task.weight for name, task in config.tasks.items()} or {"task": 1.0}
        sampler = make_sampler(config.sampler, host, seed=config.seed, weights=weights)
        loaders: dict[str, Any] = {task: PlannedLoader(task) for task in self._tasks}
        return PromptStream(sampler=sampler, loaders=loaders, name=config.sampler.name)

    def _observe_attempt(self, task: str, rollouts: Sequence[Rollout], attempts: int) -> None:
        for rollout in rollouts:
            self._lost.observe(rollout)

    async def _save(self, step: int, failure: Failure | None) -> Written:
        await asyncio.sleep(self._times.checkpoint.cut)

        async def written() -> Path:
            await asyncio.sleep(self._times.checkpoint.write)
            return Path(f"step-{step:06d}")

        return written

    async def _validate(self, version: int) -> dict[str, dict[str, float]]:
        """Play as many rollouts as a validation has, all at once."""
        requests = [
            RolloutRequest(
                prompt=Prompt(messages="-", id=str(i), environment=self._tasks[i % len(self._tasks)]),
                seed=derive_seed(self._seed, version, i),
                group=f"{VALIDATION} {version} {i}",
            )
            for i in range(self._held_out)
        ]
        await play(
            requests,
            engine=self.engine,
            environments=self._environments,
            renderer=self._renderer,
            sampling=self._sampling,
            deadline=self._config.validation.deadline,
        )
        return {}


def _engine(config: Config, times: Times, plays: Plays, cores: SharedCores) -> Engine:
    """Make the engine of the configuration, or its pool of engines."""

    def one() -> Engine:
        engine = PlannedEngine(times.engine, plays, cores)
        limit = config.engine.max_requests
        return LimitedEngine(engine, limit) if limit else engine

    if config.engine.workers == 1:
        return one()
    return EnginePool(lambda number: one(), config.engine.workers, deadline=config.engine.deadline)


def for_steps(config: Config, steps: int) -> Config:
    """Return the configuration of a run with another number of steps, which no other key changes."""
    trainer = evolve(config.trainer, steps=steps, epochs=0.0, time_limit=0.0, stop_when="")
    return evolve(config, trainer=trainer)
