"""Makes the parts that a configuration names, connects them, and sees the run through to its end."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import signal
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from attrs import asdict, define, evolve, frozen

from grpo_core import checkpoint
from grpo_core.batcher import BatchedJudge
from grpo_core.buffer import Buffer
from grpo_core.config import TINY, Config, as_table
from grpo_core.dynamic import DynamicSampling
from grpo_core.environments import EnvironmentProcess, ErrorBudget
from grpo_core.errors import GrpoError
from grpo_core.events import ErrorRaised, Event, RunEnded, RunStarted, Validated
from grpo_core.health import Limits
from grpo_core.loaders import TaskLoader
from grpo_core.models import local_directory
from grpo_core.pipeline import Pipeline, Schedule, root_cause
from grpo_core.plugins import PluginHost
from grpo_core.protocols import Engine, Judge, Sampler
from grpo_core.records import EngineSetup, Group, Prompt, Rollout, Verdict
from grpo_core.rendering import Renderer
from grpo_core.rollout import EngineBudget, Sampling
from grpo_core.samplers import checked_sample
from grpo_core.sources import find_source
from grpo_core.tracking import Recorder, RunDirectory
from grpo_core.trainer_process import ProcessTrainer, TrainerSetup, thread_count
from grpo_core.validation import Context, run_strategy

T = TypeVar("T")

DEMONSTRATIONS = 5000
"""Prompts at most whose solutions a tiny model is warmed up with."""

SYNC_GRACE = 5.0
"""Seconds after which an engine that has not kept its own deadline is given up."""

EXTRA_GROUPS = 20
"""Filtered for each group of a step, at most, unless the configuration says how many."""

CANARY = 4
"""Prompts that the engine is asked after each weight sync."""
CANARY_TOKENS = 64
"""Of each at most: enough for a prefix cache to notice them."""


@frozen(kw_only=True)
class Outcome:
    """How a run ended."""

    reason: str
    step: int
    directory: Path
    first: Mapping[str, float]
    """Validation accuracy (or the first metric of the strategy) by task, as it was before the first step."""
    last: Mapping[str, float]
    seconds: float


@define(eq=False)
class Tasks:
    """The environments of a run, each behind its process and its batcher."""

    processes: dict[str, EnvironmentProcess]
    judges: dict[str, Judge]

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, config: Config, block: Sequence[str], logs: Path | None) -> AsyncIterator[Tasks]:
        """Starts all of them at once, and ends them with the block."""
        processes = {
            name: EnvironmentProcess(
                name,
                task.env,
                task.options,
                config=config.environment,
                allow=config.plugins,
                block=block,
                log=logs / f"environment-{name}.log" if logs else None,
            )
            for name, task in config.tasks.items()
        }
        judges: dict[str, BatchedJudge] = {}
        try:
            await _all(process.start() for process in processes.values())
            judges = {name: BatchedJudge(process, config.environment) for name, process in processes.items()}
            yield cls(processes, dict(judges))
        finally:
            for judge in judges.values():
                await judge.aclose()
            await asyncio.gather(*(process.aclose() for process in processes.values()))

    async def prompts(self, config: Config, split: str) -> dict[str, Sequence[Prompt]]:
        """By task, of its source or else of its environment.  Raises PluginError, ConfigError."""

        async def of(name: str, process: EnvironmentProcess) -> Sequence[Prompt]:
            source = find_source(name, config.tasks[name].source, split)
            if source is None:
                return await process.prompts(split)
            await asyncio.to_thread(source.open)
            return source

        found = await _all(of(name, process) for name, process in self.processes.items())
        return dict(zip(self.processes, found, strict=True))


async def train(
    config: Config,
    run: RunDirectory,
    *,
    host: PluginHost,
    block: Sequence[str] = (),
    resume: checkpoint.Found | None = None,
    listeners: Sequence[Callable[[Event], None]] = (),
    status: Callable[[str], None] = lambda text: None,
) -> Outcome:
    """Train until the last step, a signal, or an error.

    SIGINT and SIGTERM end the run after its step with a checkpoint; a second one ends it at once.  Raises
    the root cause of what failed; children are gone then, and checkpoints are complete.
    """
    recorder = Recorder(run)
    scores = Scores()
    emit = partial(_emit, [recorder, scores, *listeners, host.emit])
    began = time.monotonic()
    pipeline: Pipeline | None = None
    step = resume.step if resume else 0
    try:
        async with contextlib.AsyncExitStack() as stack:
            status("starting the environments")
            tasks = await stack.enter_async_context(Tasks.start(config, block, run.logs))
            pipeline = await _assemble(config, run, host, tasks, resume, emit, status, stack)
            emit(
                RunStarted(
                    step=step,
                    directory=str(run.path),
                    config=as_table(config),
                    resumed=bool(resume),
                    buffer=asdict(pipeline.buffer.statistics()),
                )
            )
            with _signals(pipeline, status):
                reason = await pipeline.run()
            step = pipeline.buffer.step
    except asyncio.CancelledError:
        emit(RunEnded(step=step, reason="interrupted"))
        raise
    except BaseException as error:
        emit(
            ErrorRaised(
                step=step, message=_message(error), traceback="".join(traceback.format_exception(error))
            )
        )
        emit(RunEnded(step=step, reason="failed"))
        raise
    else:
        emit(RunEnded(step=step, reason=reason, metrics=scores.last))
    finally:
        recorder.close()
    return Outcome(
        reason=reason,
        step=step,
        directory=run.path,
        first=scores.first,
        last=scores.last,
        seconds=time.monotonic() - began,
    )


async def _assemble(
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
    demonstrations = await _demonstrations(tasks, prompts) if tiny and not resume else ()
    status("making a tiny model and warming it up" if tiny and not resume else "loading the model")
    trainer = _trainer(config, run, model, demonstrations, resume)
    stack.push_async_callback(trainer.aclose)
    engine = _engine(config, host, model, run.logs, threads=thread_count(config.engine.threads, asynchronous))
    stack.push_async_callback(engine.aclose)
    await asyncio.gather(trainer.started(), asyncio.to_thread(_import_what_is_needed_soon))
    renderer = await asyncio.to_thread(Renderer.load, model, trust_remote_code=config.model.trust_remote_code)
    await trainer.set_canary(_canary(prompts, renderer))
    sampling = _sampling(config)
    loaders = {
        task: TaskLoader(task, part, seed=config.seed, workers=config.tasks[task].source.workers)
        for task, part in prompts.items()
    }
    sampler = _sampler(config, host)
    buffer = _buffer(config)
    if resume:
        for told in checkpoint.restore(resume.directory, buffer, loaders, sampler):
            status(f"resuming: {told}")

    async def save(step: int) -> Path:
        return await checkpoint.write(
            run.checkpoints,
            step=step,
            pipeline=checkpoint.cut(buffer, sampler),
            loaders={task: loader.state_dict() for task, loader in loaders.items()},
            save_trainer=trainer.save,
            keep=config.checkpoint.keep,
        )

    return Pipeline(
        buffer=buffer,
        loaders=loaders,
        sampler=sampler,
        sample=lambda sampler, loaders, request: checked_sample(
            sampler, config.sampler.name, loaders, request
        ),
        engine=engine,
        trainer=trainer,
        judges=tasks.judges,
        renderer=renderer,
        sampling=sampling,
        group_size=config.rollout.group_size,
        advantages=host.function("advantage", config.advantage.name, **config.advantage.options),
        dynamic=_dynamic(config),
        seed=config.seed,
        schedule=_schedule(config),
        emit=emit,
        observe_verdict=_budgets(config, tasks),
        validate=_validation(config, host, engine, tasks, renderer, held_out),
        save=save,
        canary_tolerance=_tolerance(config),
        limits=_limits(config),
        watch=(trainer.watch,),
    )


def _import_what_is_needed_soon() -> None:
    """Takes a second, which is free while the trainer starts."""
    for module in ("transformers.tokenization_utils_tokenizers", "torchdata.stateful_dataloader"):
        importlib.import_module(module)


# ---------------------------------------------------------------------------------- the parts


def _trainer(
    config: Config,
    run: RunDirectory,
    model: str,
    demonstrations: tuple[tuple[str, str], ...],
    resume: checkpoint.Found | None,
) -> ProcessTrainer:
    setup = TrainerSetup(
        model=config.model if config.model.path == TINY else evolve(config.model, path=model),
        trainer=config.trainer,
        loss=config.loss,
        seed=config.seed,
        generates_beside=config.pipeline.max_staleness > 0,
        model_directory=str(run.model),
        demonstrations=demonstrations,
        resume_from=str(resume.directory) if resume else None,
        max_non_finite=config.health.max_non_finite,
        plugins=None if config.plugins is None else tuple(config.plugins),
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


def _engine(config: Config, host: PluginHost, model: str, logs: Path | None, *, threads: int) -> Engine:
    setup = EngineSetup(
        model=model,
        trust_remote_code=config.model.trust_remote_code,
        threads=threads,
        seed=config.seed,
        log_directory=str(logs) if logs else None,
        deadline=config.engine.deadline,
    )
    engine: Engine = host.make("engine", config.engine.name, setup, **config.engine.options)
    return engine


def _sampler(config: Config, host: PluginHost) -> Sampler:
    """The sampler; ``seed`` and the tasks' ``weights`` are given to those that take them."""
    factory = host.factory("sampler", config.sampler.name)
    takes = inspect.signature(factory).parameters
    known = {"seed": config.seed, "weights": {name: task.weight for name, task in config.tasks.items()}}
    options = {key: value for key, value in known.items() if key in takes} | config.sampler.options
    sampler: Sampler = host.make("sampler", config.sampler.name, **options)
    return sampler


def _sampling(config: Config) -> Sampling:
    rollout = config.rollout
    return Sampling(temperature=rollout.temperature, max_tokens=rollout.max_tokens, stop=tuple(rollout.stop))


def _dynamic(config: Config) -> DynamicSampling | None:
    sampling = config.sampling
    if not sampling.dynamic:
        return None
    extra = sampling.max_extra_groups or EXTRA_GROUPS * config.trainer.prompts_per_step
    return DynamicSampling(tolerance=sampling.tolerance, max_extra_groups=extra)


def _schedule(config: Config) -> Schedule:
    attempts = config.rollout.max_retries + 2
    return Schedule(
        validate_every=config.validation.every,
        save_every=config.checkpoint.every,
        rollout_deadline=config.rollout.deadline,
        sync_deadline=config.engine.deadline + SYNC_GRACE,
        in_flight_updates=config.pipeline.in_flight_updates,
        stall=config.rollout.deadline * attempts + config.trainer.deadline + config.engine.deadline,
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
        "logprob_diff/mean": Limits(*health.logprob_diff),
        "kl": Limits(*health.kl),
        "importance_ratio/effective_sample_size": Limits(*health.effective_sample_size),
        "clip_fraction/low": Limits(*health.clip_fraction),
        "clip_fraction/high": Limits(*health.clip_fraction),
    }


def _budgets(config: Config, tasks: Tasks) -> Callable[[str, Rollout], None]:
    """Faults of environments by task, those of the engine together."""
    budgets = {task: ErrorBudget(task, config.environment.max_error_rate) for task in tasks.processes}
    outstanding = (config.pipeline.max_staleness + 1) * config.trainer.prompts_per_step
    engine = EngineBudget(outstanding * config.rollout.group_size * (config.rollout.max_retries + 1))

    def observe(task: str, rollout: Rollout) -> None:
        engine.observe(rollout)
        if rollout.lost:
            return
        verdict = Verdict(reward=rollout.reward, error=rollout.error)
        budgets[task].observe(verdict, tasks.processes[task].first_traceback)

    return observe


def _validation(
    config: Config,
    host: PluginHost,
    engine: Engine,
    tasks: Tasks,
    renderer: Renderer,
    held_out: Mapping[str, Sequence[Prompt]],
) -> Callable[[int], Any]:
    name = config.validation.name
    strategy = host.make("validation_strategy", name, **config.validation.options)

    async def validate(version: int) -> Mapping[str, Mapping[str, float]]:
        context = Context(
            version=version,
            prompts={task: part[: config.validation.prompts] for task, part in held_out.items() if part},
            engine=engine,
            judges=tasks.judges,
            renderer=renderer,
            sampling=_sampling(config),
            deadline=config.rollout.deadline,
            seed=config.seed,
        )
        return await run_strategy(name, strategy, context)

    return validate


async def _demonstrations(
    tasks: Tasks, prompts: Mapping[str, Sequence[Prompt]]
) -> tuple[tuple[str, str], ...]:
    """What a tiny model is warmed up with: prompts and their solutions, of all tasks."""
    each = max(1, DEMONSTRATIONS // len(prompts))
    pairs: list[tuple[str, str]] = []
    for task, part in prompts.items():
        some = part[:each]
        for prompt, reply in zip(some, await tasks.processes[task].solve(some), strict=True):
            if reply is not None:
                text = "".join(str(message.get("content") or "") for message in prompt.messages)
                pairs.append((text, reply))
    return tuple(pairs)


# ---------------------------------------------------------------------------------- validating a run


async def validate(
    config: Config,
    model: Path,
    *,
    version: int,
    host: PluginHost,
    block: Sequence[str] = (),
    status: Callable[[str], None] = lambda text: None,
) -> Mapping[str, Mapping[str, float]]:
    """Measure the weights in a model directory with the configuration's strategy and tasks."""
    from grpo_core.weights import WeightsWriter, load_tensors

    async with contextlib.AsyncExitStack() as stack:
        status("starting the environments")
        tasks = await stack.enter_async_context(Tasks.start(config, block, None))
        held_out = await tasks.prompts(config, "validation")
        engine = _engine(config, host, str(model), None, threads=thread_count(config.engine.threads, False))
        stack.push_async_callback(engine.aclose)
        status("loading the model")
        renderer = await asyncio.to_thread(
            Renderer.load, str(model), trust_remote_code=config.model.trust_remote_code
        )
        writer = WeightsWriter()
        await engine.update_weights(writer.write(version, load_tensors(model)))
        status("validating")
        measure = _validation(config, host, engine, tasks, renderer, held_out)
        results: Mapping[str, Mapping[str, float]] = await measure(version)
        return results


# ---------------------------------------------------------------------------------- around it


class Scores:
    """The first and the last validation score of each task; a listener of events."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Validated):
            for task, metrics in event.results.items():
                if metrics:
                    value = metrics.get("accuracy", next(iter(metrics.values())))
                    self.first.setdefault(task, value)
                    self.last[task] = value


def _emit(listeners: Sequence[Callable[[Event], None]], event: Event) -> None:
    for listener in listeners:
        listener(event)


@contextlib.contextmanager
def _signals(pipeline: Pipeline, status: Callable[[str], None]) -> Any:
    """The first SIGINT or SIGTERM asks the pipeline to stop, the second ends the process' work at once."""
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    stops: list[asyncio.Task[None]] = []

    def on_signal(received: signal.Signals) -> None:
        if stops:
            main.cancel()
            return
        status(f"{received.name}: ending after this step, with a checkpoint (once more: at once)")
        stops.append(loop.create_task(pipeline.stop()))

    received = (signal.SIGINT, signal.SIGTERM)
    for each in received:
        loop.add_signal_handler(each, on_signal, each)
    try:
        yield
    finally:
        for each in received:
            loop.remove_signal_handler(each)


async def _all(awaitables: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all at once; the first that fails cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            started = [group.create_task(awaitable) for awaitable in awaitables]
    except BaseExceptionGroup as failed:
        cause = root_cause(failed)
        raise cause from cause.__cause__
    return [task.result() for task in started]


def _message(error: BaseException) -> str:
    return str(error) if isinstance(error, GrpoError) else f"{type(error).__name__}: {error}"
