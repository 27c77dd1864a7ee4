"""Trains: starts the components that a configuration names, connects them to a pipeline, and runs it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import asdict, evolve, frozen

from grpo_core.app import making, provenance
from grpo_core.app.launch import TrainingRun, changed_schedule, check_held, identity
from grpo_core.app.make import best_interval, preflight
from grpo_core.app.model_sources import ModelRequest, fetched, with_max_tokens
from grpo_core.app.prompts import judge_one_reply, short_enough
from grpo_core.app.stopping import Stop, interruptions
from grpo_core.app.tasks import Tasks
from grpo_core.config import as_table
from grpo_core.contracts import events
from grpo_core.contracts.errors import ConfigError, describe, fault_of, wrong_input
from grpo_core.contracts.incidents import report, reported_to
from grpo_core.contracts.protocols import Tracker, Trainer
from grpo_core.contracts.records import Prompt, Weights
from grpo_core.data.loaders import IndexedLoader, LookAhead
from grpo_core.data.samplers import PromptStream
from grpo_core.engines.wrapped import metrics_of
from grpo_core.loop import checkpoint
from grpo_core.loop.buffer import BufferStatistics
from grpo_core.loop.endings import GOAL_REACHED, Failure, Goal
from grpo_core.loop.health import Trend
from grpo_core.loop.metrics import validation_metrics
from grpo_core.loop.pipeline import Pipeline, Validate, Watch, Written
from grpo_core.loop.retention import Retention
from grpo_core.loop.timeline import Timeline, recorded_by
from grpo_core.processes.aio import gather
from grpo_core.processes.child import memory
from grpo_core.processes.memory import spare_the_collector
from grpo_core.reporting.files import DiskRoom
from grpo_core.reporting.trackers import Trackers, make_trackers
from grpo_core.storage.planes import check_reader
from grpo_core.storage.published import Published
from grpo_core.storage.run_directory import metrics_rows
from grpo_core.text.rendering import Renderer
from grpo_core.validation.runner import DedicatedValidator, HeldOut, WeightsTrackingEngine


@frozen(kw_only=True)
class Outcome:
    """The end of a run."""

    reason: str
    step: int
    steps: int
    """Number of steps of the whole run."""
    directory: Path
    seconds: float
    """Seconds of this process."""
    began: int = 0
    """The step after which this process began."""
    unproved: int = 0
    """Number of weight syncs since the newest version that the canary proved the engine to use."""
    inexact: Sequence[str] = ()
    """Tasks whose dataloaders do not prove their position."""


async def train(
    run: TrainingRun, *, listeners: Mapping[str, Tracker] = MappingProxyType({}), stop: Stop | None = None
) -> Outcome:
    """Train until the last step, a signal, or an error.

    On the main thread, SIGINT, SIGTERM and SIGHUP end the run after its step with a checkpoint; a second one
    ends it at once.  Raises the root cause of a failure, after all children have ended and checkpoints are
    complete.

    Args:
        run: the run; if nothing is left to train, only the trackers start.
        listeners: further trackers, by name.
        stop: does what signals do.
    """
    run.directory.forget_end()
    config, plugins = run.setup.config, run.setup.plugins
    write = partial(provenance.write, resumed_from=run.step if run.resume else None)
    await asyncio.to_thread(write, run.directory.path, config, plugins)
    _make_trackers(run, listeners)
    trackers, emit, step = run.trackers, run.trackers.emit, run.step
    timeline = Timeline(tell=trackers.stage)
    unproved, inexact = 0, list[str]()
    with interruptions(trackers.status, stop or Stop()) as interruptible:
        try:
            with reported_to(trackers.incidents.receive), recorded_by(timeline):
                timeline.stage("start")
                if run.finished is None:
                    async with started(run) as (pipeline, tasks):
                        interruptible(pipeline)
                        spare_the_collector()
                        reason, steps = await pipeline.run(), pipeline.buffer.num_steps
                        if run.setup.data_plane.remote:
                            await trackers.flush()  # they still fetch tokens for files from the plane
                        step = pipeline.buffer.step
                        unproved = pipeline.canaries.unproved
                        inexact = [name for name, loader in tasks.loaders.items() if not loader.exact]
                else:
                    reason, steps = run.finished.reason, run.finished.steps
                    run.setup.config = evolve(config, trainer=evolve(config.trainer, steps=steps))
                    emit(_started(run, run.finished.buffer))
        except BaseException as error:
            emit(timeline.extended(step))
            interrupted, last = isinstance(error, asyncio.CancelledError), max(step, trackers.step)
            if not interrupted:
                emit(events.ErrorRaised(step=last, message=describe(error), fault=fault_of(error)))
            emit(events.RunEnded(step=last, reason="interrupted" if interrupted else "failed"))
            raise
        else:
            emit(timeline.extended(step))
            emit(events.RunEnded(step=step, reason=reason))
        finally:
            await trackers.close()
        trackers.check()
    if trackers.ended:
        run.directory.mark_ended(reason, step)
    return Outcome(
        reason=reason,
        step=step,
        steps=steps,
        directory=run.directory.path,
        seconds=time.monotonic() - run.began,
        began=run.step,
        unproved=unproved,
        inexact=inexact,
    )


def _make_trackers(run: TrainingRun, listeners: Mapping[str, Tracker]) -> None:
    """Start the trackers of the run itself, of the configuration, and the listeners."""
    config, directory, resume = run.setup.config, run.directory, run.resume
    kept = config.checkpoint
    steps = sys.maxsize if config.trainer.epochs else config.trainer.steps
    run.retention = Retention(
        directory.checkpoints,
        every=kept.keep_every,
        best=kept.best,
        keep_best=kept.keep_best,
        due=partial(best_interval(config).due, last=steps),
        step=run.step,
    )
    trackers = run.trackers = Trackers()
    room = DiskRoom(directory.path, steps, trackers.emit)
    own: dict[str, Tracker] = {"room on the disk": room}
    if kept.best:
        own["retention of checkpoints"] = run.retention
    info = directory.info(config, run.step, run.validated) if resume else directory.info(config, None)
    made = make_trackers(config, run.setup.plugins, partial(trackers.info, info))
    trackers.add({**own, **made, **listeners}, checkpoint.read_trackers(resume.directory) if resume else {})


@contextlib.asynccontextmanager
async def started(run: TrainingRun) -> AsyncIterator[tuple[Pipeline, Tasks]]:
    """Start and connect the components of a run, which end with the block, and notify the trackers."""
    setup, directory = run.setup, run.directory
    run.trackers.status("starting the environments")
    importing = asyncio.create_task(asyncio.to_thread(_import_what_is_needed_soon))
    around = Tasks.start(
        setup.config,
        setup.plugins,
        setup.placement,
        sets=setup.config.validation.due_sets,
        logs=directory.logs,
        tries=run.resume is None,  # the rows of a resumed run are proved
        workers=setup.ranks if setup.trainer_here is None else 0,
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(setup.aclose)
        try:
            tasks = await stack.enter_async_context(around)
            stack.push_async_callback(setup.aclose)  # while the placement is connected
            await importing
            for remark in filter(None, (each.remark for each in tasks.environments.values())):
                run.trackers.status(remark)
            pipeline = await _connected(run, tasks)
        except BaseException:
            directory.take_back_config()  # a resumed run drops changes that prevent its start
            raise
        run.emit(_started(run, pipeline.buffer.statistics()))
        run.after.append(await asyncio.to_thread(warn_of_falls, run))
        for cause, message in run.warnings:
            run.emit(events.WarningRaised(step=run.step, cause=cause, message=message))
        for loader in tasks.loaders.values():
            loader.warn = lambda cause, message: run.emit(
                events.WarningRaised(step=pipeline.buffer.step, cause=cause, message=message)
            )
        for reason in run.resume.passed_over if run.resume else ():
            report("passed_over", "checkpoints", f"passed over {reason}")
        yield pipeline, tasks


def warn_of_falls(run: TrainingRun) -> Callable[[events.Event], None]:
    """Return a receiver of events that warns if held-out prompts get worse and training prompts do not."""
    trend = Trend()
    if run.resume is not None:
        for row in metrics_rows(run.directory.path / "metrics.jsonl"):
            trend.observe(row["step"], {name: each for name, each in row.items() if each is not None})

    def receive(event: events.Event) -> None:
        match event:
            case events.StepEnded():
                trend.observe(event.step, event.metrics)
            case events.Validated():
                found = trend.observe(event.version, validation_metrics(event.results))
                for fall in filter(None, found.values()):
                    cause = f"held_out/{fall.task}"
                    run.emit(events.WarningRaised(step=event.version, cause=cause, message=fall.message))

    return receive


def _started(run: TrainingRun, buffer: BufferStatistics) -> events.RunStarted:
    return events.RunStarted(
        step=run.step,
        directory=str(run.directory.path),
        config=as_table(run.setup.config),
        resumed=run.resume is not None,
        buffer=asdict(buffer),
        manifest=checkpoint.manifest_digest(run.resume.directory) if run.resume else "",
        validated=run.validated,
    )


async def _connected(run: TrainingRun, tasks: Tasks) -> Pipeline:
    """Start the other components after the environments, first what costs little, and connect them.

    The components of a resumed run are restored from its checkpoint.
    """
    setup, directory, resume, status = run.setup, run.directory, run.resume, run.trackers.status
    config = setup.config
    environments, section = tasks.environments, config.validation
    devices = await asyncio.to_thread(setup.placement.devices, setup.trainer_here, setup.engines, setup.ranks)
    if devices.summary:
        status(devices.summary)
    prompts: Mapping[str, Sequence[Prompt]]
    prompts = await tasks.prompts("train", config.trainer.prompts_per_step)
    held_out: Sequence[HeldOut]
    held_out = await tasks.held_out(section, section.due_sets, config.tasks if section.every else ())
    run.warnings += [note for data in tasks.data.values() for note in data.notes.items()]
    ahead = tasks.loaders
    making.check_loaders(config.trainer.epochs, ahead, setup.sampler, config.sampler.name)
    at_hand = {name: part for name, part in prompts.items() if name not in ahead}
    await judge_one_reply(environments, at_hand, hints="hints" in setup.loss.needs)
    await setup.data_plane.started()
    check_reader(setup.data_plane, config.data_plane.name)

    async def training() -> Mapping[str, Sequence[Prompt]]:
        return prompts

    first = [prompt for part in prompts.values() for prompt in part[:1]]
    request = ModelRequest(
        directory=directory.model,
        prompts=training,
        environments=environments,
        seed=config.seed,
        status=status,
        check=partial(making.check_small_files, config, setup.engines.values(), prompts=first),
    )
    model = await setup.model.start_model(request)
    early = model.prepare is None  # its files are here before the trainer has started
    if early:  # perhaps just downloaded
        run.warnings += await preflight(config, setup.plugins, model=Path(model.path))
    scores = dict(setup.scores)
    for name in (name for name in scores if scores[name].model):
        scores[name] = evolve(scores[name], weights=await fetched(scores[name].model, status))
    if config.rollout.max_tokens == 0:
        setup.config = config = with_max_tokens(config, model.max_tokens)
        directory.complete_config(config)
    making.check_lengths(config.rollout, model.positions)
    if early:
        renderer, prompts, held_out = await _rendered(run, tasks, model.path, prompts, held_out)
    elif config.rollout.max_prompt_tokens and config.trainer.epochs:
        raise ConfigError(
            f"rollout.max_prompt_tokens with trainer.epochs: the model {config.model.path!r} is made when "
            "the run starts, so the number of remaining prompts is not known before; set trainer.steps "
            "instead of trainer.epochs"
        )
    chosen = making.with_steps(
        config.trainer, {name: tasks.size(name, part) for name, part in prompts.items()}
    )
    setup.config = config = evolve(config, trainer=chosen)
    status(model.doing)
    of_trainer = making.trainer_setup(
        config,
        setup.plugins,
        model.path,
        scores=scores,
        prepare=model.prepare,
        resume_from=str(resume.directory) if resume else None,
        transport=setup.transport,
        env_vars=devices.trainer,
        shares_gpu=bool(devices.shared),
        profile=str(directory.profile),
        log=str(directory.logs / "trainer.log"),
    )
    trainer: Trainer = setup.keep(setup.plugins.make("trainer", chosen.name, of_trainer, **chosen.options))
    engines = making.engines(setup, devices, model.path, directory.logs)
    await gather(each.started() for each in (trainer, *engines.values()) if hasattr(each, "started"))
    if not early:
        renderer, prompts, held_out = await _rendered(run, tasks, model.path, prompts, held_out)

    for remark in setup.remarks:
        if remark.costs:
            run.warnings.append(("off_policy", remark.message))
        else:
            status(remark.message)
    if resume and (changed := changed_schedule(run.step, resume.saved.run.schedule, chosen)):
        run.warnings.append(("schedule", changed))
    for loader in ahead.values():
        loader.status, loader.slots = status, config.slots
    loaders: Mapping[str, LookAhead] = {
        name: ahead[name] if name in ahead else IndexedLoader(name, part, seed=config.seed)
        for name, part in prompts.items()
    }
    buffer = making.buffer(config)
    stream = PromptStream(sampler=setup.sampler, loaders=loaders, name=config.sampler.name)
    held = None if resume is None else Published.read(resume.directory / "trainer")

    def check(weights: Weights) -> None:
        """Raise ConfigError if the engine of a resumed run holds other weights than before."""
        if held is not None:
            try:
                now = making.published(config, engines["engine"], weights, weights.version)
                check_held(directory.path, held, now)
            except BaseException:
                directory.take_back_config()
                raise

    engine = WeightsTrackingEngine(engines["engine"], check)
    own = engines.get("validation.engine")
    playing = making.playing(config.rollout, environments, renderer, seed=config.seed)
    validation = making.validation(setup, playing, held_out, own or engine, emit=run.emit, last=chosen.steps)
    if resume is not None:
        for note in checkpoint.restore(resume.directory, buffer, loaders, stream, validation):
            status(f"resuming: {note}")
        validation.validated = run.validated
        with wrong_input():  # a dataloader that does not give its rows again is an error now
            await gather(loader.first(1) for loader in loaders.values())
    validate: Validate = validation
    watch: list[Watch] = [trainer.watch, run.trackers.watch]
    if own is not None:
        of_own = setup.engines["validation.engine"]
        validate = DedicatedValidator(
            measure=validation,
            engine=own,
            trained=engine,
            emit=run.emit,
            last=chosen.steps,
            pauses=section.pause,
            deadline=making.SYNC_ATTEMPTS * of_own.deadline + making.SYNC_GRACE,
            canary_tolerance=making.canary_tolerance(config.health, of_own),
        )
        watch.append(validate.watch)
    process = identity(config, Path(model.path))
    shared: list[Any] = [engines[key] for key in sorted(devices.shared)]

    async def save(step: int, failure: Failure | None) -> Written:
        cut = checkpoint.snapshot(buffer, stream, validation, failure)
        states, weights = run.trackers.states(), engine.weights  # at the moment of the cut
        return await checkpoint.begin(
            directory.checkpoints,
            step=step,
            pipeline={**cut, "validated": validation.validated, "goal": run.goal, "run": process},
            loaders=checkpoint.loader_states(loaders, cut["buffer"]),
            trackers=states,
            save_trainer=trainer.save,
            published=held if weights is None else making.published(config, engine, weights, step),
            keep=config.checkpoint.keep if failure is None else None,
            spared=run.retention.spared,
        )

    pipeline = Pipeline(
        buffer=buffer,
        prompts=stream,
        engine=engine,
        playing=playing,
        plane=setup.data_plane,
        learning=setup.learning,
        trainer=trainer,
        checks=evolve(making.checks(config, setup.remarks, environments, prompts, renderer), watch=watch),
        schedule=making.schedule(config, began=run.began),
        emit=run.emit,
        flush=run.trackers.flush,
        readings=lambda: {
            **run.trackers.metrics(),
            **run.trackers.incidents.read(),
            **metrics_of(engines),
            **memory(),
        },
        validate=validate,
        validate_first=validation.validated < run.step,
        save=save,
        resting=[each for each in shared if hasattr(each, "rest")],
    )
    run.trackers.on_stop(partial(pipeline.stop, at_leisure=True))
    if chosen.stop_when:
        run.after.append(stop_at(Goal.parse(chosen.stop_when), pipeline, run.goal))
    return pipeline


async def _rendered(
    run: TrainingRun,
    tasks: Tasks,
    model: str,
    prompts: Mapping[str, Sequence[Prompt]],
    held_out: Sequence[HeldOut],
) -> tuple[Renderer, Mapping[str, Sequence[Prompt]], Sequence[HeldOut]]:
    """Load the renderer of the model; return it with the prompts that are short enough."""
    config, environments = run.setup.config, tasks.environments
    sections = run.setup.engines.values()
    renderer = await asyncio.to_thread(making.load_renderer, config.model, model, sections)
    most = config.rollout.max_prompt_tokens
    prompts, held_out, messages = await short_enough(
        most, prompts, held_out, environments, renderer, tasks.loaders
    )
    there = {"held_out": held_out, "prompts": prompts, "environments": environments}
    run.warnings += messages.items()
    run.warnings += await preflight(config, run.setup.plugins, renderer=renderer, **there)
    return renderer, prompts, held_out


def stop_at(goal: Goal, pipeline: Pipeline, seen: dict[str, float]) -> Callable[[events.Event], None]:
    """Return a receiver of events that stops the pipeline when the goal is reached.

    It keeps the metric's value in ``seen``: the newest one, or the first that reaches the goal.  It raises
    ConfigError if nothing measures the metric.
    """

    def receive(event: events.Event) -> None:
        values = (
            event.metrics
            if isinstance(event, events.StepEnded)
            else validation_metrics(event.results)
            if isinstance(event, events.Validated)
            else {}
        )
        goal.check(values)
        if goal.metric in values and not goal.reached(seen):
            seen[goal.metric] = values[goal.metric]
        if goal.reached(values):
            pipeline.stop(GOAL_REACHED, at_leisure=True)

    return receive


def _import_what_is_needed_soon() -> None:
    """Import a slow module while the environments start; a trainer in a thread may import it, too."""
    with contextlib.suppress(ImportError):  # not public; this only saves time
        importlib.import_module("transformers.tokenization_utils_tokenizers")
