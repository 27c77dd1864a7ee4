"""A run of the real pipeline on virtual time, with parts that take the time that they are said to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import evolve, frozen

from grpo_core.app.parts import Parts, sampling_params
from grpo_core.app.workers import POOL
from grpo_core.config import Config
from grpo_core.data.samplers import PromptStream
from grpo_core.engines.limited import LimitedEngine
from grpo_core.events import Event
from grpo_core.incidents import reported_to
from grpo_core.loop.pipeline import Checks, Pipeline, Save
from grpo_core.loop.rollout import RolloutRequest, derive_seed, play
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import Engine, EnvironmentClient, Loader, Renderer, Trainer
from grpo_core.records import Prompt, Rollout
from grpo_core.testing.clock import run


@frozen(kw_only=True)
class SimulatedParts:
    """The parts that do nothing in a simulated run but take time."""

    engine: Callable[[], Engine]
    """Makes one of the engines of ``engine.workers``."""
    trainer: Trainer
    environments: Mapping[str, EnvironmentClient]
    """By task."""
    loaders: Mapping[str, Loader]
    renderer: Renderer
    save: Save
    """Writes a checkpoint."""
    held_out: int = 0
    """Number of rollouts of a validation; the name of their groups begins with "validation"."""


def simulate_run(
    config: Config, host: PluginHost, parts: SimulatedParts, *, seed: int, emit: Callable[[Event], None]
) -> None:
    """Run the pipeline that a configuration describes; ``emit`` receives its events on virtual time.

    Raises GrpoError if the run fails, such as by a deadline that rollouts cannot keep.
    """

    async def story() -> None:
        engine = _engine(config, host, parts)
        with reported_to(lambda incident: None):  # what is tried again counts in the times
            try:
                await _pipeline(config, host, parts, engine, seed, emit).run()
            finally:
                await engine.aclose()

    run(story(), horizon=float("inf"))


def _pipeline(
    config: Config,
    host: PluginHost,
    parts: SimulatedParts,
    engine: Engine,
    seed: int,
    emit: Callable[[Event], None],
) -> Pipeline:
    named = Parts(evolve(config, filters={}), host)  # the tokens that they look at are not there
    stream = PromptStream(sampler=named.sampler(), loaders=parts.loaders, name=config.sampler.name)
    lost, sampling, tasks = named.lost_budget(), sampling_params(config.rollout), list(parts.environments)

    def observe_attempt(task: str, rollouts: Sequence[Rollout], attempts: int) -> None:
        for rollout in rollouts:
            lost.observe(rollout)

    async def validate(version: int) -> dict[str, dict[str, float]]:
        await play(
            [
                RolloutRequest(
                    prompt=Prompt(messages="-", id=str(i), environment=tasks[i % len(tasks)]),
                    seed=derive_seed(seed, version, i),
                    group=f"validation {version} {i}",
                )
                for i in range(parts.held_out)
            ],
            engine=engine,
            environments=parts.environments,
            renderer=parts.renderer,
            sampling=sampling,
            deadline=config.validation.deadline,
        )
        return {}

    return Pipeline(
        buffer=named.buffer(),
        prompts=stream,
        engine=engine,
        playing=evolve(named.playing(parts.environments, parts.renderer), seed=seed),
        learning=named.learning(),
        trainer=parts.trainer,
        checks=Checks(observe_attempt=observe_attempt),
        schedule=evolve(named.schedule(), time_limit=None),
        emit=emit,
        validate=validate if parts.held_out else None,
        save=parts.save if config.checkpoint.every else None,
    )


def _engine(config: Config, host: PluginHost, parts: SimulatedParts) -> Engine:
    """Make the engine of the configuration, or its pool of engines."""

    def one() -> Engine:
        engine, limit = parts.engine(), config.engine.max_requests
        return LimitedEngine(engine, limit) if limit else engine

    if config.engine.workers == 1:
        return one()
    make_pool = host.find("engine", POOL).load()
    pool: Engine = make_pool(lambda number: one(), config.engine.workers, deadline=config.engine.deadline)
    return pool
