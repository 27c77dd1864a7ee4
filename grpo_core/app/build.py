"""Builds a run: starts the parts that its configuration names, and connects them to a pipeline."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import define, evolve, field

from grpo_core.app import readings
from grpo_core.app.first_look import first_look, leaks
from grpo_core.app.gpus import Devices
from grpo_core.app.lengths import RunPrompts, has_tokenizer
from grpo_core.app.parts import (
    SYNC_ATTEMPTS,
    SYNC_GRACE,
    Parts,
    check_dataloaders,
    check_lengths,
    with_steps,
)
from grpo_core.app.placement import Placement
from grpo_core.app.resume import changed_schedule, identity
from grpo_core.app.tasks import Tasks
from grpo_core.config import Config, EngineConfig
from grpo_core.data.dataloaders import Dataloader
from grpo_core.data.loaders import TaskLoader
from grpo_core.data.samplers import PromptStream
from grpo_core.events import Event, StepEnded, Validated, WarningRaised
from grpo_core.loop import checkpoint
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.endings import GOAL_REACHED, Failure, Goal
from grpo_core.loop.metrics import validation_metrics
from grpo_core.loop.pipeline import Pipeline, Save, Validate, Watch, Written
from grpo_core.loop.rendering import Renderer
from grpo_core.loop.retention import Retention
from grpo_core.model_files import check_files
from grpo_core.model_sources import ModelRequest, StartModel, model_source
from grpo_core.models import chat_template, local_directory
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import DataPlane, Engine, Trainer
from grpo_core.records import Group, Prompt
from grpo_core.reporting.trackers import Trackers
from grpo_core.run_directory import RunDirectory
from grpo_core.validation.engine import DedicatedValidator, WeightsTrackingEngine
from grpo_core.validation.sets import Validation

Loaders = Mapping[str, TaskLoader | Dataloader]
"""Loaders of prompts by task."""


@define(kw_only=True, eq=False)
class RunContext:
    """The surroundings of a run: its directory, plugins, environments and trackers."""

    directory: RunDirectory
    plugins: PluginHost
    placement: Placement
    tasks: Tasks = field(init=False)
    """The environments, once they have started."""
    resume: checkpoint.Found | None
    trackers: Trackers
    retention: Retention
    stack: contextlib.AsyncExitStack
    """Closes everything that was started."""
    began: float = 0.0
    """Start of the program, on the clock of the event loop, from which a time limit counts."""
    after: list[Callable[[Event], None]] = field(factory=list)
    """Each is called with each event that the trackers have received."""
    warnings: list[WarningRaised] = field(factory=list)
    """Found while the run was built; raised when it has started."""
    goal: dict[str, float] = field(factory=dict)
    """Value of the metric of ``trainer.stop_when``, by its name; each checkpoint contains it."""

    @property
    def step(self) -> int:
        """The step that the run continues from; 0 for a new run."""
        return self.resume.step if self.resume else 0

    def emit(self, event: Event) -> None:
        """Send an event to all trackers."""
        self.trackers.emit(event)
        for receive in self.after:
            receive(event)

    def warn(self, messages: Mapping[str, str]) -> None:
        """Note warnings, by cause, which are raised when the run has started."""
        self.warnings += [
            WarningRaised(step=self.step, cause=cause, message=message) for cause, message in messages.items()
        ]


async def build_pipeline(config: Config, run: RunContext) -> tuple[Config, Pipeline]:
    """Start every part of a run whose environments have started, and make its pipeline.

    Returns the configuration with the number of steps, too.
    """
    parts, tasks = Parts(config, run.plugins), run.tasks
    devices = await asyncio.to_thread(run.placement.devices, parts.trainer_here, parts.engines())
    if devices.told:
        run.trackers.status(devices.told)
    chosen = config.validation
    found = RunPrompts(
        prompts=await tasks.prompts("train", config.trainer.prompts_per_step),
        held_out=await tasks.held_out(chosen, chosen.due_sets, tasks=bool(chosen.every)),
    )
    check_dataloaders(config, tasks.dataloaders, parts.sampler())
    plane = await _data_plane(parts, run)
    model = await _start_model(parts, run, found)
    teacher = config.teacher.path and await asyncio.to_thread(local_directory, config.teacher.path)
    check_lengths(config.rollout, model.positions)

    async def load_renderer() -> tuple[Renderer, RunPrompts]:
        """Load the renderer; return it with the prompts that are short enough."""
        sections = [each for each in (config.engine, chosen.engine) if each is not None]
        renderer = await asyncio.to_thread(parts.renderer, model.path, sections)
        kept, messages = await found.short_enough(
            config.rollout.max_prompt_tokens, tasks.environments, renderer, tasks.dataloaders
        )
        run.warn(messages)
        return renderer, kept

    renderer = None
    if config.rollout.max_prompt_tokens and has_tokenizer(config, model):
        renderer, found = await load_renderer()
    sizes = {name: tasks.size(name, part) for name, part in found.prompts.items()}
    config = with_steps(config, sizes)
    parts = Parts(config, run.plugins)
    trainer = _trainer(parts, run, model, teacher, devices)
    logs, colocated = run.directory.logs, config.pipeline.max_staleness > 0
    engines = {
        key: _engine(
            parts,
            run,
            section,
            model.path,
            logs if key == "engine" else logs / "validation",
            colocated=colocated or key != "engine",
            env_vars=devices.engines.get(key, ()),
        )
        for key, section in parts.engines().items()
    }
    await asyncio.to_thread(_import_what_is_needed_soon, config)
    await trainer.started()  # after the imports: a trainer in a thread may import the same
    if renderer is None:
        renderer, found = await load_renderer()
    return config, await _pipeline(parts, run, found, renderer, trainer, plane, engines)


async def _pipeline(
    parts: Parts,
    run: RunContext,
    found: RunPrompts,
    renderer: Renderer,
    trainer: Trainer,
    plane: DataPlane,
    engines: Mapping[str, Engine],
) -> Pipeline:
    """Connect the parts that have started; continue where the checkpoint of a resumed run left them."""
    config, prompts, held_out = parts.config, found.prompts, found.held_out
    environments = run.tasks.environments
    run.warnings += await first_look(run.step, config.rollout, environments, prompts, renderer, held_out)
    run.warnings += await asyncio.to_thread(leaks, run.step, prompts, held_out)
    if run.resume is not None and (changed := changed_schedule(run.resume, config.trainer)):
        run.warn({"schedule": changed})
    buffer, loaders, places = parts.buffer(), _loaders(config, run.tasks, prompts), parts.places()
    stream = PromptStream(sampler=parts.sampler(), loaders=loaders, name=config.sampler.name)
    _restore(run, checkpoint.restore, buffer, loaders, stream)
    engine, own = engines["engine"], engines.get("validation.engine")
    validation = parts.validation(
        held_out, own or engine, renderer, places, emit=run.emit, last=config.trainer.steps
    )
    _restore(run, checkpoint.restore_validation, validation)
    if run.resume is not None:
        validation.measured = checkpoint.measured(run.resume)
    validate: Validate = validation
    watch: list[Watch] = [trainer.watch, run.trackers.watch]
    if own is not None:
        engine = WeightsTrackingEngine(engine)
        validate = _dedicated(parts, run, validation, own, engine)
        watch.append(validate.watch)
    pipeline = Pipeline(
        buffer=buffer,
        prompts=stream,
        engine=engine,
        playing=evolve(parts.playing(environments, renderer), places=places),
        plane=plane,
        learning=parts.learning(),
        trainer=trainer,
        checks=evolve(parts.checks(environments, prompts, renderer), watch=watch),
        schedule=parts.schedule(began=run.began),
        emit=run.emit,
        flush=run.trackers.flush,
        readings=_readings(run.trackers, engine),
        validate=validate,
        validate_first=validation.measured < run.step,
        save=_save(config, run, trainer, buffer, loaders, stream, validation),
    )
    run.trackers.on_stop(partial(pipeline.stop, at_leisure=True))
    if config.trainer.stop_when:
        run.after.append(stop_at(Goal.parse(config.trainer.stop_when), pipeline, run.goal))
    return pipeline


def _restore(run: RunContext, restore: Callable[..., Iterable[str]], *parts: Any) -> None:
    """Let parts go on where the checkpoint of a resumed run left them, and say what could not be kept."""
    if run.resume:
        for told in restore(run.resume.directory, *parts):
            run.trackers.status(f"resuming: {told}")


def stop_at(goal: Goal, pipeline: Pipeline, seen: dict[str, float]) -> Callable[[Event], None]:
    """Return a receiver of events that stops the pipeline when the goal is reached.

    It keeps the metric's value in ``seen``: the newest one, or the first that reaches the goal.  It raises
    ConfigError if nothing measures the metric.
    """

    def receive(event: Event) -> None:
        values = (
            event.metrics
            if isinstance(event, StepEnded)
            else validation_metrics(event.results)
            if isinstance(event, Validated)
            else {}
        )
        goal.check(values)
        if goal.metric in values and not goal.reached(seen):
            seen[goal.metric] = values[goal.metric]
        if goal.reached(values):
            pipeline.stop(GOAL_REACHED, at_leisure=True)

    return receive


# ---------------------------------------------------------------------------------- parts that start


async def _data_plane(parts: Parts, run: RunContext) -> DataPlane:
    plane = parts.data_plane(run.placement)

    async def close(kind: object, error: BaseException | None, traceback: object) -> None:
        try:
            if plane.remote and error is None:
                await run.trackers.flush()  # what the run's files lack still, they fetch from the plane
        finally:
            await plane.aclose()

    run.stack.push_async_exit(close)
    await plane.started()
    return plane


async def _start_model(parts: Parts, run: RunContext, found: RunPrompts) -> StartModel:
    """Return the model that the run starts from, which may have to be made first."""

    async def prompts() -> Mapping[str, Sequence[Prompt]]:
        return found.prompts

    config = parts.config
    start = await model_source(config.model, run.plugins).start_model(
        ModelRequest(
            directory=run.directory.model,
            prompts=prompts,
            environments=run.tasks.environments,
            seed=config.seed,
        )
    )
    if start.prepare is None:  # it may have been downloaded just now
        path, template = Path(start.path), chat_template(config.model.chat_template)
        odd = await asyncio.to_thread(check_files, path, template)
        run.warnings += [WarningRaised(step=run.step, cause="model", message=each) for each in odd]
    return start


def _trainer(parts: Parts, run: RunContext, model: StartModel, teacher: str, devices: Devices) -> Trainer:
    """Start the trainer, which makes the model if need be."""
    run.trackers.status(model.doing)
    setup = evolve(
        parts.trainer_setup(model.path, teacher),
        prepare=model.prepare,
        resume_from=str(run.resume.directory) if run.resume else None,
        transport=parts.transport(run.placement),
        env_vars=devices.trainer,
        shares_gpu=devices.shared,
        profile=str(run.directory.profile),
        log=str(run.directory.logs / "trainer.log"),
    )
    chosen = parts.config.trainer
    trainer: Trainer = run.plugins.make("trainer", chosen.name, setup, **chosen.options)
    run.stack.push_async_callback(trainer.aclose)
    return trainer


def _engine(
    parts: Parts,
    run: RunContext,
    section: EngineConfig,
    model: str,
    logs: Path,
    *,
    colocated: bool,
    env_vars: Sequence[Mapping[str, str]],
) -> Engine:
    """Start the engine of a section, without waiting for it."""
    logs.mkdir(exist_ok=True)
    setup = parts.engine_setup(section, model, logs=logs, colocated=colocated)
    engine = parts.engine(section, setup, run.placement, env_vars)
    run.stack.push_async_callback(engine.aclose)
    return engine


def _import_what_is_needed_soon(config: Config) -> None:
    """Import modules that take a second, while the trainer starts."""
    modules = ["transformers.tokenization_utils_tokenizers"]
    if any(task.source.path or task.dataloader for task in config.tasks.values()):
        modules.append("torchdata.stateful_dataloader")
    for module in modules:
        importlib.import_module(module)


# ---------------------------------------------------------------------------------- parts of the loop


def _loaders(config: Config, tasks: Tasks, prompts: Mapping[str, Sequence[Prompt]]) -> Loaders:
    return {
        name: tasks.dataloaders[name]
        if name in tasks.dataloaders
        else TaskLoader(
            name,
            part,
            seed=config.seed,
            workers=config.tasks[name].source.workers,
            torchdata=bool(config.tasks[name].source.path),
        )
        for name, part in prompts.items()
    }


def _dedicated(
    parts: Parts, run: RunContext, measure: Validation, own: Engine, trained: WeightsTrackingEngine
) -> DedicatedValidator:
    """Make what validates with an engine of its own."""
    validation = parts.config.validation
    section = validation.engine
    assert section is not None
    return DedicatedValidator(
        measure=measure,
        engine=own,
        trained=trained,
        emit=run.emit,
        last=parts.config.trainer.steps,
        pauses=validation.pause,
        deadline=SYNC_ATTEMPTS * section.deadline + SYNC_GRACE,
        canary_tolerance=parts.canary_tolerance(section),
        canary_deadline=section.deadline + SYNC_GRACE,
    )


def _readings(trackers: Trackers, engine: Engine) -> Callable[[], Mapping[str, float]]:
    """Return the function that reads what went on beside the loop since its last call."""
    incidents = trackers.incidents.read
    return lambda: {
        **trackers.metrics(),
        **incidents(),
        **readings.of_engine(engine),
        **readings.memory(),
    }


def _save(
    config: Config,
    run: RunContext,
    trainer: Trainer,
    buffer: Buffer[Prompt, Group],
    loaders: Loaders,
    stream: PromptStream,
    validation: Validation,
) -> Save:
    """Return the function that writes a checkpoint."""
    process = identity(config)

    async def save(step: int, failure: Failure | None) -> Written:
        cut = checkpoint.cut(buffer, stream, validation, failure)
        states = run.trackers.states()  # of the same moment
        return await checkpoint.begin(
            run.directory.checkpoints,
            step=step,
            pipeline={
                **cut,
                "measured": validation.measured,
                "goal": run.goal,
                "run": process,
            },
            loaders=checkpoint.loader_states(loaders, cut["buffer"]),
            trackers=states,
            save_trainer=trainer.save,
            keep=config.checkpoint.keep if failure is None else None,
            spared=run.retention.spared,
        )

    return save
