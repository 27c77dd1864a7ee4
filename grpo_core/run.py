"""Makes the parts that a configuration names, connects them, and sees the run through to its end."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
import time
import traceback
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from attrs import define, evolve, frozen

from grpo_core import checkpoint
from grpo_core.batcher import BatchedJudge
from grpo_core.buffer import Buffer
from grpo_core.config import TINY, Config, as_table
from grpo_core.environments import EnvironmentProcess, ErrorBudget
from grpo_core.errors import CheckpointError, GrpoError
from grpo_core.events import ErrorRaised, Event, RunEnded, RunStarted, Validated
from grpo_core.loaders import TaskLoader
from grpo_core.models import local_directory
from grpo_core.pipeline import Pipeline, Schedule, root_cause
from grpo_core.plugins import PluginHost
from grpo_core.protocols import Engine, Judge, Sampler
from grpo_core.records import EngineSetup, Group, Prompt, Rollout, Verdict
from grpo_core.rendering import Renderer
from grpo_core.rollout import Sampling
from grpo_core.samplers import checked_sample
from grpo_core.tracking import Recorder, RunDirectory
from grpo_core.validation import Context, run_strategy

T = TypeVar("T")

DEMONSTRATIONS = 5000
"""Prompts at most whose solutions a tiny model is warmed up with."""


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

    async def prompts(self, split: str) -> dict[str, list[Prompt]]:
        """By task.  Raises PluginError if a task has none."""
        found = await _all(process.prompts(split) for process in self.processes.values())
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
                RunStarted(step=step, directory=str(run.path), config=as_table(config), resumed=bool(resume))
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
    from grpo_core.trainer import ProcessTrainer, TrainerSetup, thread_count

    asynchronous = config.pipeline.max_staleness > 0
    tiny = config.model.path == TINY
    model = str(run.model) if tiny else await asyncio.to_thread(local_directory, config.model.path)
    prompts = await tasks.prompts("train")
    held_out = await tasks.prompts("validation") if config.validation.every else {}
    demonstrations = await _demonstrations(tasks, prompts) if tiny and not resume else ()
    status("making a tiny model and warming it up" if tiny and not resume else "loading the model")
    trainer = ProcessTrainer(
        TrainerSetup(
            model=config.model if tiny else evolve(config.model, path=model),
            trainer=config.trainer,
            loss=config.loss,
            seed=config.seed,
            generates_beside=asynchronous,
            model_directory=str(run.model),
            demonstrations=demonstrations,
            resume_from=str(resume.directory) if resume else None,
            plugins=None if config.plugins is None else tuple(config.plugins),
        ),
        log=run.logs / "trainer.log",
    )
    stack.push_async_callback(trainer.aclose)
    engine = _engine(config, host, model, run.logs, threads=thread_count(config.engine.threads, asynchronous))
    stack.push_async_callback(engine.aclose)
    await trainer.started()
    renderer = await asyncio.to_thread(Renderer.load, model, trust_remote_code=config.model.trust_remote_code)
    sampling = _sampling(config)
    loaders = {task: TaskLoader(task, part, seed=config.seed) for task, part in prompts.items()}
    sampler = _sampler(config, host)
    buffer: Buffer[Prompt, Group] = Buffer(
        prompts_per_step=config.trainer.prompts_per_step,
        max_staleness=config.pipeline.max_staleness,
        num_steps=config.trainer.steps,
        policy=config.pipeline.policy,
        max_retries=config.rollout.max_retries,
    )
    if resume:
        _restore(resume, buffer, loaders, sampler)

    async def save(step: int) -> Path:
        state = {
            "buffer": checkpoint.dump_buffer(buffer),
            "sampler": sampler.state_dict() if hasattr(sampler, "state_dict") else None,
        }
        return await checkpoint.write(
            run.checkpoints,
            step=step,
            pipeline=state,
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
        seed=config.seed,
        schedule=_schedule(config),
        emit=emit,
        observe_verdict=_budgets(config, tasks),
        validate=_validation(config, host, engine, tasks, renderer, held_out),
        save=save,
    )


# ---------------------------------------------------------------------------------- the parts


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


def _schedule(config: Config) -> Schedule:
    attempts = config.rollout.max_retries + 2
    return Schedule(
        validate_every=config.validation.every,
        save_every=config.checkpoint.every,
        rollout_deadline=config.rollout.deadline,
        in_flight_updates=config.pipeline.in_flight_updates,
        stall=config.rollout.deadline * attempts + config.trainer.deadline + config.engine.deadline,
    )


def _budgets(config: Config, tasks: Tasks) -> Callable[[str, Rollout], None]:
    budgets = {task: ErrorBudget(task, config.environment.max_error_rate) for task in tasks.processes}

    def observe(task: str, rollout: Rollout) -> None:
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


def _restore(
    found: checkpoint.Found,
    buffer: Buffer[Prompt, Group],
    loaders: Mapping[str, TaskLoader],
    sampler: Sampler,
) -> None:
    state = checkpoint.read_pipeline(found.directory)
    for task, loader in loaders.items():
        saved = checkpoint.read_loader(found.directory, task)
        if saved is not None:
            loader.load_state_dict(saved)
    if state["sampler"] is not None and hasattr(sampler, "load_state_dict"):
        sampler.load_state_dict(state["sampler"])

    def prompt(task: str, id: str) -> Prompt:
        if task not in loaders:
            raise CheckpointError(
                f"{found.directory}: has prompts of task {task!r}, which the run has no more"
            )
        return loaders[task].prompt(id)

    checkpoint.load_buffer(buffer, state["buffer"], prompt)


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
    from grpo_core.trainer import thread_count
    from grpo_core.weights import WeightsWriter, load_tensors

    async with contextlib.AsyncExitStack() as stack:
        status("starting the environments")
        tasks = await stack.enter_async_context(Tasks.start(config, block, None))
        held_out = await tasks.prompts("validation")
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
