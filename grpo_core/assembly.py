"""Makes the parts that a configuration names and connects them to a pipeline."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import evolve

from grpo_core import checkpoint, workers
from grpo_core.buffer import Buffer
from grpo_core.config import TINY, Config
from grpo_core.data.loaders import TaskLoader
from grpo_core.data.samplers import checked_sample
from grpo_core.demonstrations import demonstrations
from grpo_core.dynamic import DynamicSampling
from grpo_core.environments.process import ErrorBudget
from grpo_core.events import Event, WarningRaised
from grpo_core.health import Limits
from grpo_core.models import local_directory
from grpo_core.parts import make_sampler
from grpo_core.pipeline import Pipeline, Schedule, Validate
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import Engine
from grpo_core.records import EngineSetup, Feedback, Group, Prompt, Rollout
from grpo_core.rendering import Renderer
from grpo_core.reporting.tracking import RunDirectory
from grpo_core.rollout import LostBudget, SamplingParams
from grpo_core.tasks import Tasks
from grpo_core.training.process import ProcessTrainer, TrainerSetup, thread_count
from grpo_core.validation.engine import DedicatedValidator, WeightsTrackingEngine
from grpo_core.validation.runner import Context, Results, run_strategy

SYNC_GRACE = 5.0
"""Seconds after which an engine that has not kept its own deadline is given up."""

EXTRA_GROUPS = 20
"""Filtered for each group of a step, at most, unless the configuration says how many."""

CANARY = 4
"""Prompts that the engine is asked after each weight sync."""
CANARY_TOKENS = 64
"""Of each at most: enough for a prefix cache to notice them."""


async def assemble(
    config: Config,
    run: RunDirectory,
    host: PluginHost,
    tasks: Tasks,
    resume: checkpoint.Found | None,
    emit: Callable[[Event], None],
    status: Callable[[str], None],
    stack: contextlib.AsyncExitStack,
) -> Pipeline:
    asynchronous = config.pipeline.max_staleness > 0
    tiny = config.model.path == TINY
    model = str(run.model) if tiny else await asyncio.to_thread(local_directory, config.model.path)
    prompts = await tasks.prompts(config, "train")
    held_out = await tasks.prompts(config, "validation") if config.validation.every else {}
    solved = await demonstrations(tasks, prompts) if tiny and not resume else ()
    status("making a tiny model and warming it up" if tiny and not resume else "loading the model")
    trainer = _trainer(config, run, host, model, solved, resume)
    stack.push_async_callback(trainer.aclose)
    buffer = _buffer(config)
    engine = make_engine(
        config,
        host,
        model,
        run.logs,
        threads=thread_count(config.engine.threads, asynchronous),
        tell=lambda text: emit(WarningRaised(step=buffer.step, cause="engine", message=text)),
    )
    stack.push_async_callback(engine.aclose)
    own = _validation_engine(config, host, model, run, stack)
    await asyncio.gather(trainer.started(), asyncio.to_thread(_import_what_is_needed_soon))
    renderer = await asyncio.to_thread(Renderer.load, model, trust_remote_code=config.model.trust_remote_code)
    sampling = _sampling(config)
    loaders = {
        task: TaskLoader(task, part, seed=config.seed, workers=config.tasks[task].source.workers)
        for task, part in prompts.items()
    }
    weights = {name: task.weight for name, task in config.tasks.items()}
    sampler = make_sampler(config.sampler, host, seed=config.seed, weights=weights)
    if resume:
        for told in checkpoint.restore(resume.directory, buffer, loaders, sampler):
            status(f"resuming: {told}")

    async def save(step: int) -> Callable[[], Awaitable[Path]]:
        return await checkpoint.begin(
            run.checkpoints,
            step=step,
            pipeline=checkpoint.cut(buffer, sampler),
            loaders={task: loader.state_dict() for task, loader in loaders.items()},
            save_trainer=trainer.save,
            keep=config.checkpoint.keep,
        )

    measure = make_validation(config, host, own or engine, tasks, renderer, held_out)
    watch: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = (trainer.watch,)
    validate: Validate = measure
    if own is not None:
        engine = WeightsTrackingEngine(engine)
        beside = _on_its_own_engine(config, measure, own, engine, emit)
        validate, watch = beside, (*watch, beside.watch)

    return Pipeline(
        buffer=buffer,
        loaders=loaders,
        sampler=sampler,
        sample=lambda sampler, loaders, request: checked_sample(
            sampler, config.sampler.name, loaders, request
        ),
        engine=engine,
        trainer=trainer,
        environments=tasks.environments,
        renderer=renderer,
        sampling=sampling,
        group_size=config.rollout.group_size,
        advantages=host.function("advantage", config.advantage.name, **config.advantage.options),
        dynamic=_dynamic(config),
        seed=config.seed,
        schedule=_schedule(config),
        emit=emit,
        observe_rollout=_budgets(config, tasks),
        validate=validate,
        save=save,
        canary=_canary(prompts, renderer),
        canary_tolerance=_tolerance(config),
        limits=_limits(config),
        watch=watch,
    )


def _import_what_is_needed_soon() -> None:
    """Takes a second, which is free while the trainer starts."""
    for module in ("transformers.tokenization_utils_tokenizers", "torchdata.stateful_dataloader"):
        importlib.import_module(module)


# ---------------------------------------------------------------------------------- the parts


def _trainer(
    config: Config,
    run: RunDirectory,
    host: PluginHost,
    model: str,
    demonstrations: tuple[tuple[str, ...], ...],
    resume: checkpoint.Found | None,
) -> ProcessTrainer:
    setup = TrainerSetup(
        model=config.model if config.model.path == TINY else evolve(config.model, path=model),
        trainer=config.trainer,
        loss=config.loss,
        seed=config.seed,
        colocated=config.pipeline.max_staleness > 0,
        model_directory=str(run.model),
        demonstrations=demonstrations,
        resume_from=str(resume.directory) if resume else None,
        async_save=config.checkpoint.async_save,
        transport=workers.transport(config, host),
        collective_host=config.engine.collective_host,
        max_non_finite=config.health.max_non_finite,
        plugins=None if config.plugins is None else tuple(config.plugins),
        block=host.block,
    )
    return ProcessTrainer(setup, log=run.logs / "trainer.log")


def _buffer(config: Config) -> Buffer[Prompt, Group]:
    return Buffer(
        prompts_per_step=config.trainer.prompts_per_step,
        max_staleness=config.pipeline.max_staleness,
        num_steps=config.trainer.steps,
        policy=config.pipeline.policy,
        max_retries=config.rollout.max_retries,
    )


def make_engine(
    config: Config,
    host: PluginHost,
    model: str,
    logs: Path | None,
    *,
    threads: int,
    tell: Callable[[str], None] = lambda text: None,
) -> Engine:
    setup = EngineSetup(
        model=model,
        trust_remote_code=config.model.trust_remote_code,
        threads=threads,
        seed=config.seed,
        log_directory=str(logs.absolute()) if logs else None,
        deadline=config.engine.deadline,
    )
    return workers.make_engine(config, host, setup, tolerance=_tolerance(config), tell=tell)


def _validation_engine(
    config: Config, host: PluginHost, model: str, run: RunDirectory, stack: contextlib.AsyncExitStack
) -> Engine | None:
    """The engine that only validation uses, if one is configured."""
    if config.validation.engine is None or not config.validation.every:
        return None
    logs = run.logs / "validation"
    logs.mkdir(exist_ok=True)
    threads = thread_count(config.validation.engine.threads, True)
    engine = make_engine(evolve(config, engine=config.validation.engine), host, model, logs, threads=threads)
    stack.push_async_callback(engine.aclose)
    return engine


def _on_its_own_engine(
    config: Config,
    measure: Callable[[int], Awaitable[Results]],
    engine: Engine,
    trained: WeightsTrackingEngine,
    emit: Callable[[Event], None],
) -> DedicatedValidator:
    assert config.validation.engine is not None
    return DedicatedValidator(
        measure=measure,
        engine=engine,
        trained=trained,
        emit=emit,
        last=config.trainer.steps,
        pauses=config.validation.pause,
        deadline=config.validation.engine.deadline + SYNC_GRACE,
        canary_tolerance=_tolerance(evolve(config, engine=config.validation.engine)),
        canary_deadline=config.rollout.deadline,
    )


def _sampling(config: Config) -> SamplingParams:
    rollout = config.rollout
    return SamplingParams(
        temperature=rollout.temperature,
        max_tokens=rollout.max_tokens,
        stop=tuple(rollout.stop),
        max_turns=rollout.max_turns,
        max_total_tokens=rollout.max_total_tokens,
        max_tool_calls=rollout.max_tool_calls,
    )


def _dynamic(config: Config) -> DynamicSampling | None:
    given = config.dynamic_sampling
    if not given.enabled:
        return None
    extra = given.max_extra_groups or EXTRA_GROUPS * config.trainer.prompts_per_step
    return DynamicSampling(tolerance=given.tolerance, max_extra_groups=extra)


def _schedule(config: Config) -> Schedule:
    attempts = config.rollout.max_retries + 2
    return Schedule(
        validate_every=config.validation.every,
        save_every=config.checkpoint.every,
        rollout_deadline=config.rollout.deadline,
        sync_deadline=config.engine.deadline + SYNC_GRACE,
        in_flight_updates=config.pipeline.in_flight_updates,
        pause_to_validate=config.validation.pause,
        stall=config.rollout.deadline * attempts
        + config.trainer.deadline
        + config.engine.deadline
        + config.validation.deadline * bool(config.validation.every),
    )


def _canary(prompts: Mapping[str, Sequence[Prompt]], renderer: Renderer) -> list[tuple[int, ...]]:
    """The beginnings of some prompts of all tasks, in tokens."""
    some = [prompt for part in prompts.values() for prompt in part[: max(1, CANARY // len(prompts))]]
    return [renderer.prompt_ids(prompt.messages)[:CANARY_TOKENS] for prompt in some[:CANARY]]


def _tolerance(config: Config) -> float:
    """Of the canary: rounding in float32, or in bfloat16 where the trainer or the engine computes in it."""
    coarse = "bfloat16" in (config.model.dtype, config.engine.options.get("dtype"))
    return config.health.canary_tolerance or (0.1 if coarse else 1e-3)


def _limits(config: Config) -> dict[str, Limits]:
    health = config.health
    return {
        "logprob_diff_mean": Limits(*health.logprob_diff),
        "mismatch_kl": Limits(*health.mismatch_kl),
        "effective_sample_size": Limits(*health.effective_sample_size),
        "clip_fraction_low": Limits(*health.clip_fraction),
        "clip_fraction_high": Limits(*health.clip_fraction),
    }


def _budgets(config: Config, tasks: Tasks) -> Callable[[str, Rollout], None]:
    """Faults of environments by task; rollouts that were lost, by whatever, together."""
    budgets = {task: ErrorBudget(task, config.environment.max_error_rate) for task in tasks.processes}
    outstanding = (config.pipeline.max_staleness + 1) * config.trainer.prompts_per_step
    lost = LostBudget(outstanding * config.rollout.group_size * (config.rollout.max_retries + 1))

    def observe(task: str, rollout: Rollout) -> None:
        lost.observe(rollout)
        if rollout.lost:
            return
        feedback = Feedback(reward=rollout.reward, error=rollout.error)
        budgets[task].observe(feedback, tasks.processes[task].first_traceback)

    return observe


def make_validation(
    config: Config,
    host: PluginHost,
    engine: Engine,
    tasks: Tasks,
    renderer: Renderer,
    held_out: Mapping[str, Sequence[Prompt]],
) -> Callable[[int], Awaitable[Results]]:
    """What measures a version on an engine that holds it, with the configuration's strategy."""
    name = config.validation.name
    strategy = host.make("validation_strategy", name, **config.validation.options)

    async def validate(version: int) -> Results:
        context = Context(
            version=version,
            prompts={task: part[: config.validation.prompts] for task, part in held_out.items() if part},
            engine=engine,
            environments=tasks.environments,
            renderer=renderer,
            sampling=_sampling(config),
            deadline=config.validation.deadline,
            retries=config.rollout.max_retries,
            seed=config.seed,
        )
        return await run_strategy(name, strategy, context)

    return validate
