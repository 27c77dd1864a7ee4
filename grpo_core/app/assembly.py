"""Makes the parts that a configuration names and connects them to a pipeline."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import define, evolve, field, frozen

from grpo_core.aio import Slots
from grpo_core.app import readings, workers
from grpo_core.app.again import trains_all_rows
from grpo_core.app.first_look import first_look, leaks
from grpo_core.app.gpus import Devices
from grpo_core.app.lengths import RunPrompts, has_tokenizer
from grpo_core.app.parts import (
    SYNC_ATTEMPTS,
    SYNC_GRACE,
    canary_prompts,
    canary_tolerance,
    check_dataloaders,
    check_lengths,
    dynamic_sampling,
    engine_dtype,
    engine_setup,
    engines_of,
    error_budgets,
    health_limits,
    load_renderer,
    make_advantages,
    make_buffer,
    make_data_plane,
    make_sampler,
    make_schedule,
    make_shaping,
    make_validation,
    reproducible,
    rollout_places,
    sampling_params,
    trainer_here,
    with_steps,
)
from grpo_core.app.placement import Placement
from grpo_core.app.resume import changed_schedule, identity
from grpo_core.app.tasks import Tasks
from grpo_core.config import Config, EngineConfig, TeacherConfig
from grpo_core.data.dataloaders import Dataloader
from grpo_core.data.loaders import TaskLoader
from grpo_core.data.samplers import PromptStream
from grpo_core.events import Event, StepEnded, Validated, WarningRaised
from grpo_core.loop import checkpoint
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.dynamic import DynamicSampling
from grpo_core.loop.endings import GOAL_REACHED, Failure, Goal, TimeLimit
from grpo_core.loop.metrics import validation_metrics
from grpo_core.loop.pipeline import ObserveAttempt, Pipeline, Save, Schedule, Validate, Watch, Written
from grpo_core.loop.rendering import Renderer
from grpo_core.loop.retention import Retention
from grpo_core.model_files import check_files
from grpo_core.model_sources import ModelRequest, StartModel, model_source
from grpo_core.models import chat_template, local_directory
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import DataPlane, Engine, Sampler, Trainer
from grpo_core.records import Group, Prompt
from grpo_core.reporting.trackers import Trackers
from grpo_core.run_directory import RunDirectory
from grpo_core.training.setup import TrainerSetup
from grpo_core.validation.engine import DedicatedValidator, WeightsTrackingEngine
from grpo_core.validation.sets import HeldOut, Validation

Prompts = Mapping[str, Sequence[Prompt]]
"""Prompts by task."""


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
    """Found while the run was assembled; raised when it has started."""
    goal: dict[str, float] = field(factory=dict)
    """Value of the metric of ``trainer.stop_when``, by its name; each checkpoint contains it."""

    @property
    def emit(self) -> Callable[[Event], None]:
        """Sends an event to all trackers."""
        return self._emit

    def _emit(self, event: Event) -> None:
        self.trackers.emit(event)
        for receive in self.after:
            receive(event)


@frozen(kw_only=True)
class _Started:
    """The parts that had to start before a pipeline can be made."""

    found: RunPrompts
    renderer: Renderer
    buffer: Buffer[Prompt, Group]
    plane: DataPlane
    trainer: Trainer
    engine: Engine
    validation_engine: Engine | None


async def assemble(config: Config, run: RunContext) -> tuple[Config, Pipeline]:
    """Make the pipeline of a run, and start everything that it needs.

    Returns the configuration with the number of steps, too.
    """
    assembly = Assembly(config, run, await choose_devices(config, run))
    started = await assembly.start()
    config, renderer, trainer = assembly.config, started.renderer, started.trainer
    prompts, held_out = started.found.prompts, started.found.held_out
    run.warnings.extend(await assembly.first_look(prompts, held_out, renderer))
    run.warnings.extend(await asyncio.to_thread(leaks, assembly.step, prompts, held_out))
    if run.resume is not None and (changed := changed_schedule(run.resume, config.trainer)):
        run.warnings.append(WarningRaised(step=run.resume.step, cause="schedule", message=changed))
    loaders = assembly.loaders(prompts)
    stream = PromptStream(sampler=assembly.sampler(), loaders=loaders, name=config.sampler.name)
    _restore(run, checkpoint.restore, started.buffer, loaders, stream)
    validation = assembly.validation(started.validation_engine or started.engine, renderer, held_out)
    _restore(run, checkpoint.restore_validation, validation)
    if run.resume is not None:
        validation.measured = checkpoint.measured(run.resume)
    engine, validate = assembly.validator(started.engine, started.validation_engine, validation)
    pipeline = Pipeline(
        buffer=started.buffer,
        draw=stream.draw,
        ready=stream.ready,
        passed_over=stream.passed_over,
        observe=stream.observe,
        untrained=stream.untrained,
        engine=engine,
        trainer=trainer,
        plane=started.plane,
        environments=run.tasks.environments,
        renderer=renderer,
        sampling=sampling_params(config.rollout),
        group_size=config.rollout.group_size,
        places=assembly.places,
        advantages=make_advantages(config.advantage, run.plugins),
        all_rows=trains_all_rows(config, run.plugins),
        shaping=make_shaping(config.shaping, max_tokens=config.rollout.max_tokens),
        dynamic=assembly.dynamic(),
        seed=config.seed,
        schedule=assembly.schedule(),
        emit=run.emit,
        flush=run.trackers.flush,
        observe_attempt=assembly.budgets(),
        readings=assembly.readings(engine),
        validate=validate,
        validate_first=validation.measured < assembly.step,
        save=assembly.save(trainer, started.buffer, loaders, stream, validation),
        canary=canary_prompts(prompts, renderer),
        canary_tolerance=canary_tolerance(config.health, config.engine),
        limits=health_limits(config.health),
        time_limit=assembly.time_limit(),
        watch=assembly.watched(trainer, validate),
    )
    run.trackers.on_stop(partial(pipeline.stop, at_leisure=True))
    if config.trainer.stop_when:
        run.after.append(stop_at(Goal.parse(config.trainer.stop_when), pipeline, run.goal))
    return config, pipeline


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


async def choose_devices(config: Config, run: RunContext) -> Devices:
    """Choose the GPUs of the run's processes, and tell the user."""
    engines = engines_of(config, trains=True)
    trainer = trainer_here(config.trainer, run.plugins)
    devices = await asyncio.to_thread(run.placement.devices, trainer, engines)
    if devices.told:
        run.trackers.status(devices.told)
    return devices


def _import_what_is_needed_soon(config: Config) -> None:
    """Import modules that take a second, while the trainer starts."""
    modules = ["transformers.tokenization_utils_tokenizers"]
    if any(task.source.path or task.dataloader for task in config.tasks.values()):
        modules.append("torchdata.stateful_dataloader")
    for module in modules:
        importlib.import_module(module)


@define(eq=False)
class Assembly:
    """Makes the parts of a run that start processes, or are made from several sections."""

    config: Config
    run: RunContext
    devices: Devices = field(factory=Devices)
    """GPUs of the run's processes."""
    places: Slots = field(init=False)
    """Limit how many rollouts are played at the same time, in training and validation."""

    @places.default
    def _places(self) -> Slots:
        return rollout_places(self.config.rollout)

    @property
    def step(self) -> int:
        """The step that the run continues from; 0 for a new run."""
        return self.run.resume.step if self.run.resume else 0

    async def start(self) -> _Started:
        """Start the data plane, the trainer and the engines, with the prompts that are short enough.

        The configuration has the number of steps afterwards.
        """
        config, chosen = self.config, self.config.validation
        found = RunPrompts(
            prompts=await self.run.tasks.prompts("train", config.trainer.prompts_per_step),
            held_out=await self.run.tasks.held_out(chosen, chosen.due_sets, tasks=bool(chosen.every)),
        )
        check_dataloaders(config, self.run.tasks.dataloaders, self.sampler())
        plane = await self.data_plane()
        start = await self.start_model(found.prompts)
        teacher = await self.teacher()
        check_lengths(config.rollout, start.positions)
        model = start.path
        renderer = None
        if config.rollout.max_prompt_tokens and has_tokenizer(config, start):
            renderer = await self.renderer(model)
            found = await self.short_enough(found, renderer)
        sizes = {name: self.run.tasks.size(name, part) for name, part in found.prompts.items()}
        config = self.config = with_steps(config, sizes)
        trainer = self.trainer(start, teacher)
        buffer = make_buffer(config.trainer, config.pipeline, config.rollout)
        engine, validation_engine = self.engine(model), self.validation_engine(model)
        await asyncio.to_thread(_import_what_is_needed_soon, config)
        await trainer.started()  # after the imports: a trainer in a thread may import the same
        if renderer is None:
            renderer = await self.renderer(model)
            found = await self.short_enough(found, renderer)
        return _Started(
            found=found,
            renderer=renderer,
            buffer=buffer,
            plane=plane,
            trainer=trainer,
            engine=engine,
            validation_engine=validation_engine,
        )

    async def start_model(self, prompts: Prompts) -> StartModel:
        """Return the model that the run starts from, which may have to be made first."""

        async def given() -> Prompts:
            return prompts

        start = await model_source(self.config.model, self.run.plugins).start_model(
            ModelRequest(
                directory=self.run.directory.model,
                prompts=given,
                environments=self.run.tasks.environments,
                seed=self.config.seed,
            )
        )
        if start.prepare is None:  # it may have been downloaded just now
            path, template = Path(start.path), chat_template(self.config.model.chat_template)
            odd = await asyncio.to_thread(check_files, path, template)
            self.run.warnings += [WarningRaised(step=self.step, cause="model", message=each) for each in odd]
        return start

    def readings(self, engine: Engine) -> Callable[[], Mapping[str, float]]:
        """Return the function that reads what went on beside the loop since its last call."""
        trackers = self.run.trackers
        incidents = trackers.incidents.read
        return lambda: {
            **trackers.metrics(),
            **incidents(),
            **readings.of_engine(engine),
            **readings.memory(),
        }

    async def data_plane(self) -> DataPlane:
        """Start the data plane of the run."""
        run = self.run
        plane = make_data_plane(self.config.data_plane, run.plugins, run.placement)

        async def close(kind: object, error: BaseException | None, traceback: object) -> None:
            try:
                if plane.remote and error is None:
                    await run.trackers.flush()  # what the run's files lack still, they fetch from the plane
            finally:
                await plane.aclose()

        run.stack.push_async_exit(close)
        await plane.started()
        return plane

    async def teacher(self) -> TeacherConfig:
        """Return the section of the teacher with the directory of its model, which may be downloaded."""
        teacher = self.config.teacher
        if not teacher.path:
            return teacher
        return evolve(teacher, path=await asyncio.to_thread(local_directory, teacher.path))

    def trainer(self, model: StartModel, teacher: TeacherConfig) -> Trainer:
        """Start the trainer, which makes the model if need be."""
        self.run.trackers.status(model.doing)
        chosen = self.config.trainer
        trainer = self.run.plugins.make(
            "trainer", chosen.name, self.trainer_setup(model, teacher), **chosen.options
        )
        self.run.stack.push_async_callback(trainer.aclose)
        return trainer

    def trainer_setup(self, model: StartModel, teacher: TeacherConfig) -> TrainerSetup:
        config, run = self.config, self.run
        return TrainerSetup(
            sections=config.sections,
            model=evolve(config.model, path=model.path),
            prepare=model.prepare,
            trainer=config.trainer,
            loss=config.loss,
            teacher=teacher,
            optimizer=config.optimizer,
            seed=config.seed,
            colocated=self.colocated,
            resume_from=str(run.resume.directory) if run.resume else None,
            async_save=config.checkpoint.async_save,
            transport=workers.transport(
                config.engine,
                config.validation.engine if config.validation.measures else None,
                run.placement,
                run.plugins,
                from_here=trainer_here(config.trainer, run.plugins) is not None,
            ),
            engine_dtype=engine_dtype(engines_of(config, trains=True).values()),
            collective_host=config.engine.collective_host,
            collective_ports=config.engine.collective_ports,
            max_non_finite=config.health.max_non_finite,
            env_vars=self.devices.trainer,
            shares_gpu=self.devices.shared,
            plugins=run.plugins.selection.allow,
            block=run.plugins.selection.block,
            profile=str(run.directory.profile),
            log=str(run.directory.logs / "trainer.log"),
        )

    @property
    def colocated(self) -> bool:
        """Whether engines generate on this machine while the trainer trains."""
        return self.config.pipeline.max_staleness > 0

    def engine(self, model: str) -> Engine:
        return self._engine(
            "engine", self.config.engine, model, self.run.directory.logs, colocated=self.colocated
        )

    def validation_engine(self, model: str) -> Engine | None:
        """Make the engine that only validation uses, if one is configured."""
        engine = self.config.validation.engine
        if engine is None or not self.config.validation.measures:
            return None
        logs = self.run.directory.logs / "validation"
        logs.mkdir(exist_ok=True)
        return self._engine("validation.engine", engine, model, logs, colocated=True)

    def _engine(self, key: str, engine: EngineConfig, model: str, logs: Path, *, colocated: bool) -> Engine:
        config = self.config
        made = workers.make_engine(
            engine,
            engine_setup(
                model,
                config,
                engine,
                logs=logs,
                colocated=colocated,
                reproducible=reproducible(config.pipeline),
            ),
            self.run.placement,
            workers=workers.workers_of(engine, self.run.plugins),
            tolerance=canary_tolerance(config.health, engine),
            env_vars=self.devices.engines.get(key, ()),
        )
        self.run.stack.push_async_callback(made.aclose)
        return made

    def dynamic(self) -> DynamicSampling | None:
        """Make what discards groups that teach nothing."""
        config = self.config
        return dynamic_sampling(
            config.dynamic_sampling,
            config.filters,
            self.run.plugins,
            prompts_per_step=config.trainer.prompts_per_step,
        )

    def schedule(self) -> Schedule:
        """Make the times and numbers that the loop keeps to."""
        config = self.config
        return make_schedule(
            rollout=config.rollout,
            engine=config.engine,
            trainer=config.trainer,
            pipeline=config.pipeline,
            validation=config.validation,
            checkpoint=config.checkpoint,
        )

    def time_limit(self) -> TimeLimit | None:
        seconds = self.config.trainer.time_limit
        return TimeLimit(end=self.run.began + seconds, seconds=seconds) if seconds else None

    async def renderer(self, model: str) -> Renderer:
        sections = (self.config.engine, self.config.validation.engine)
        engines = [each for each in sections if each is not None]
        return await asyncio.to_thread(load_renderer, model, self.config.model, engines)

    async def first_look(
        self, prompts: Prompts, held_out: Sequence[HeldOut], renderer: Renderer
    ) -> list[WarningRaised]:
        """Return warnings about what would keep the model from learning."""
        environments = self.run.tasks.environments
        return await first_look(self.step, self.config.rollout, environments, prompts, renderer, held_out)

    async def short_enough(self, found: RunPrompts, renderer: Renderer) -> RunPrompts:
        """Return the prompts without those that are too long by ``rollout.max_prompt_tokens``."""
        most = self.config.rollout.max_prompt_tokens
        kept, told = await found.short_enough(
            most, self.run.tasks.environments, renderer, self.run.tasks.dataloaders
        )
        self.run.warnings.extend(
            WarningRaised(step=self.step, cause=cause, message=message) for cause, message in told.items()
        )
        return kept

    def loaders(self, prompts: Prompts) -> dict[str, TaskLoader | Dataloader]:
        tasks, seed, dataloaders = self.config.tasks, self.config.seed, self.run.tasks.dataloaders
        read = {
            name: TaskLoader(
                name,
                part,
                seed=seed,
                workers=tasks[name].source.workers,
                torchdata=bool(tasks[name].source.path),
            )
            for name, part in prompts.items()
            if name not in dataloaders
        }
        return {name: dataloaders[name] if name in dataloaders else read[name] for name in prompts}

    def sampler(self) -> Sampler:
        config = self.config
        weights = {name: task.weight for name, task in config.tasks.items()}
        return make_sampler(config.sampler, self.run.plugins, seed=config.seed, weights=weights)

    def budgets(self) -> ObserveAttempt:
        config = self.config
        outstanding = (config.pipeline.max_staleness + 1) * config.trainer.prompts_per_step
        return error_budgets(
            self.run.tasks.environments,
            max_error_rate=config.environment.max_error_rate,
            max_retries=config.rollout.max_retries,
            max_lost=outstanding * config.rollout.group_size * (config.rollout.max_retries + 1),
        )

    def validation(self, engine: Engine, renderer: Renderer, held_out: Sequence[HeldOut]) -> Validation:
        config, run = self.config, self.run
        return make_validation(
            held_out,
            config.rollout,
            run.plugins,
            seed=config.seed,
            engine=engine,
            renderer=renderer,
            places=self.places,
            last=config.trainer.steps,
            emit=run.emit,
        )

    def validator(self, engine: Engine, own: Engine | None, measure: Validation) -> tuple[Engine, Validate]:
        """Return the engine for training, and the function that validates."""
        config, run = self.config, self.run
        section = config.validation.engine
        if own is None or section is None:
            return engine, measure
        trained = WeightsTrackingEngine(engine)
        return trained, DedicatedValidator(
            measure=measure,
            engine=own,
            trained=trained,
            emit=run.emit,
            last=config.trainer.steps,
            pauses=config.validation.pause,
            deadline=SYNC_ATTEMPTS * section.deadline + SYNC_GRACE,
            canary_tolerance=canary_tolerance(config.health, section),
            canary_deadline=section.deadline + SYNC_GRACE,
        )

    def watched(self, trainer: Trainer, validate: Validate) -> Sequence[Watch]:
        """Return the functions that raise when a part that runs beside the pipeline has failed."""
        beside = (trainer.watch, self.run.trackers.watch)
        return (*beside, validate.watch) if isinstance(validate, DedicatedValidator) else beside

    def save(
        self,
        trainer: Trainer,
        buffer: Buffer[Prompt, Group],
        loaders: Mapping[str, TaskLoader | Dataloader],
        stream: PromptStream,
        validation: Validation,
    ) -> Save:
        directory, keep = self.run.directory.checkpoints, self.config.checkpoint.keep
        process = identity(self.config)

        async def save(step: int, failure: Failure | None) -> Written:
            cut = checkpoint.cut(buffer, stream, validation, failure)
            states = self.run.trackers.states()  # of the same moment
            return await checkpoint.begin(
                directory,
                step=step,
                pipeline={
                    **cut,
                    "measured": validation.measured,
                    "goal": self.run.goal,
                    "run": process,
                },
                loaders=checkpoint.loader_states(loaders, cut["buffer"]),
                trackers=states,
                save_trainer=trainer.save,
                keep=keep if failure is None else None,
                spared=self.run.retention.spared,
            )

        return save
