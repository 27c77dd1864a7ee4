"""Trains: starts the parts that a configuration names, connects them to a pipeline, and runs it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import asdict, evolve, frozen

from grpo_core.app import provenance, readings
from grpo_core.app.first_look import RunPrompts, first_look, has_tokenizer, judge_one_reply, leaks
from grpo_core.app.gpus import Devices
from grpo_core.app.launch import Launch, changed_schedule, check_held, identity
from grpo_core.app.make import interval_of
from grpo_core.app.model_sources import ModelRequest, StartModel, fetched, with_max_tokens
from grpo_core.app.parts import SYNC_ATTEMPTS, SYNC_GRACE, check_lengths, check_loaders, with_steps
from grpo_core.app.stopping import Stop, interruptions
from grpo_core.app.tasks import Tasks
from grpo_core.config import ScoreConfig, as_table
from grpo_core.contracts.errors import describe, fault_of, wrong_input
from grpo_core.contracts.events import (
    ErrorRaised,
    Event,
    RunEnded,
    RunStarted,
    StepEnded,
    Validated,
    WarningRaised,
)
from grpo_core.contracts.incidents import report, reported_to
from grpo_core.contracts.protocols import Engine, Tracker, Trainer
from grpo_core.contracts.records import Group, Prompt, Weights
from grpo_core.data.loaders import IndexedLoader, LookAhead
from grpo_core.data.samplers import PromptStream
from grpo_core.loop import checkpoint
from grpo_core.loop.buffer import Buffer, BufferStatistics
from grpo_core.loop.endings import GOAL_REACHED, Failure, Goal
from grpo_core.loop.health import Trend
from grpo_core.loop.metrics import validation_metrics
from grpo_core.loop.pipeline import Pipeline, Save, Validate, Watch, Written
from grpo_core.loop.retention import Retention
from grpo_core.loop.timeline import Timeline, taken_down
from grpo_core.loop.versions import Interval
from grpo_core.processes.aio import gather
from grpo_core.processes.garbage import spare_the_collector
from grpo_core.reporting.room import DiskRoom
from grpo_core.reporting.trackers import Trackers, make_trackers
from grpo_core.storage.planes import check_reader
from grpo_core.storage.published import Published
from grpo_core.storage.run_directory import metrics_rows
from grpo_core.text.rendering import Renderer
from grpo_core.validation.runner import DedicatedValidator, Validation, WeightsTrackingEngine

Loaders = Mapping[str, LookAhead]
"""Loaders of prompts by task."""


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
    proved: int | None = None
    """The newest version that the canary proved the engine to use."""
    unproved: int = 0
    """Number of weight syncs since then, or since the first one."""
    inexact: Sequence[str] = ()
    """Tasks whose dataloaders do not prove their position."""


async def train(
    start: Launch, *, listeners: Mapping[str, Tracker] = MappingProxyType({}), stop: Stop | None = None
) -> Outcome:
    """Train until the last step, a signal, or an error.

    On the main thread, SIGINT, SIGTERM and SIGHUP end the run after its step with a checkpoint; a second one
    ends it at once.  Raises the root cause of a failure, after all children have ended and checkpoints are
    complete.

    Args:
        start: the run; if nothing is left to train, only the trackers start.
        listeners: further trackers, by name.
        stop: does what signals do.
    """
    start.directory.forget_end()
    resumed_from = start.found.step if start.found else None
    await asyncio.to_thread(
        provenance.write,
        start.directory.path,
        start.parts.config,
        start.parts.plugins,
        resumed_from=resumed_from,
    )
    _make_trackers(start, listeners)
    with interruptions(start.trackers.status, stop or Stop()) as interruptible:
        return await _train(start, interruptible)


async def _train(run: Launch, interruptible: Callable[[Pipeline], None]) -> Outcome:
    """Train with trackers that have started, and end them.

    Args:
        interruptible: is called with the pipeline.
    """
    trackers, emit, over = run.trackers, run.trackers.emit, run.over
    timeline = Timeline(tell=trackers.stage)
    step = run.step
    try:
        async with run.stack as stack:
            stack.enter_context(reported_to(trackers.report))
            stack.push_async_callback(run.parts.aclose)
            stack.enter_context(taken_down(timeline))
            timeline.stage("start")
            if over is None:
                pipeline = await _start(run)
                interruptible(pipeline)
                spare_the_collector()
                reason, steps = await pipeline.run(), pipeline.buffer.num_steps
                if run.parts.data_plane.remote:
                    await trackers.flush()  # they still fetch tokens for files from the plane
                step = pipeline.buffer.step
                proved, unproved = pipeline.canaries.proved, pipeline.canaries.unproved
                inexact = [name for name, loader in run.tasks.loaders.items() if not loader.exact]
            else:
                reason, steps = over.reason, over.steps
                proved, unproved, inexact = None, 0, []
                config = run.parts.config
                run.parts.config = evolve(config, trainer=evolve(config.trainer, steps=steps))
                emit(_started(run, over.buffer))
    except BaseException as error:
        emit(timeline.extended(step))
        interrupted, last = isinstance(error, asyncio.CancelledError), max(step, trackers.step)
        if not interrupted:
            emit(ErrorRaised(step=last, message=describe(error), fault=fault_of(error)))
        emit(RunEnded(step=last, reason="interrupted" if interrupted else "failed"))
        raise
    else:
        emit(timeline.extended(step))
        emit(RunEnded(step=step, reason=reason))
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
        proved=proved,
        unproved=unproved,
        inexact=inexact,
    )


def _make_trackers(run: Launch, listeners: Mapping[str, Tracker]) -> None:
    """Start the trackers of the run itself, of the configuration, and the listeners."""
    config, directory, resume = run.parts.config, run.directory, run.found
    kept = config.checkpoint
    steps = sys.maxsize if config.trainer.epochs else config.trainer.steps
    best = kept.best.removeprefix("-")
    measured = Interval(interval_of(best, config, "checkpoint.best")[1]) if best else Interval()
    run.retention = Retention(
        directory.checkpoints,
        every=kept.keep_every,
        best=kept.best,
        keep_best=kept.keep_best,
        due=partial(measured.due, last=steps),
        step=run.step,
    )
    trackers = run.trackers = Trackers()
    room = DiskRoom(directory.path, steps, trackers.emit)
    own: dict[str, Tracker] = {"room on the disk": room}
    if kept.best:
        own["retention of checkpoints"] = run.retention
    info = directory.info(config, *((resume.step, checkpoint.measured(resume)) if resume else (None,)))
    made = make_trackers(config, run.parts.plugins, partial(trackers.info, info))
    trackers.add({**own, **made, **listeners}, checkpoint.read_trackers(resume.directory) if resume else {})


async def _start(run: Launch) -> Pipeline:
    """Start every part of a run, and notify the trackers of its start."""
    parts, directory = run.parts, run.directory
    run.trackers.status("starting the environments")
    importing = asyncio.create_task(asyncio.to_thread(_import_what_is_needed_soon))
    around = Tasks.start(
        parts,
        sets=parts.config.validation.due_sets,
        logs=directory.logs,
        tries=run.found is None,  # the rows of a resumed run are proved
    )
    try:
        run.tasks = await run.stack.enter_async_context(around)
        run.stack.push_async_callback(parts.aclose)  # while the placement is connected
        await importing
        for remark in filter(None, (each.remark for each in run.tasks.environments.values())):
            run.trackers.status(remark)
        pipeline = await build_pipeline(run)
    except BaseException:
        directory.take_back_config()  # a resumed run drops changes that prevent its start
        raise
    run.emit(_started(run, pipeline.buffer.statistics()))
    run.after.append(await asyncio.to_thread(warn_of_falls, run))
    for cause, message in run.warnings:
        run.emit(WarningRaised(step=run.step, cause=cause, message=message))
    for loader in run.tasks.loaders.values():
        loader.warn = lambda cause, message: run.emit(
            WarningRaised(step=pipeline.buffer.step, cause=cause, message=message)
        )
    for reason in run.found.passed_over if run.found else ():
        report("passed_over", "checkpoints", f"passed over {reason}")
    return pipeline


def warn_of_falls(run: Launch) -> Callable[[Event], None]:
    """Return a receiver of events that warns if held-out prompts get worse and training prompts do not."""
    trend = Trend()
    if run.found is not None:
        for row in metrics_rows(run.directory.path / "metrics.jsonl"):
            trend.observe(row["step"], {name: each for name, each in row.items() if each is not None})

    def receive(event: Event) -> None:
        match event:
            case StepEnded():
                trend.observe(event.step, event.metrics)
            case Validated():
                found = trend.observe(event.version, validation_metrics(event.results))
                for fall in filter(None, found.values()):
                    cause = f"held_out/{fall.task}"
                    run.emit(WarningRaised(step=event.version, cause=cause, message=fall.message))

    return receive


def _started(context: Launch, buffer: BufferStatistics) -> RunStarted:
    return RunStarted(
        step=context.step,
        directory=str(context.directory.path),
        config=as_table(context.parts.config),
        resumed=context.found is not None,
        buffer=asdict(buffer),
        manifest=checkpoint.manifest_digest(context.found.directory) if context.found else "",
        measured=checkpoint.measured(context.found) if context.found else -1,
    )


async def build_pipeline(run: Launch) -> Pipeline:
    """Start the other parts of a run after its environments, and make its pipeline."""
    parts, tasks, config = run.parts, run.tasks, run.parts.config
    devices = await asyncio.to_thread(parts.placement.devices, parts.trainer_here, parts.engines, parts.ranks)
    if devices.told:
        run.trackers.status(devices.told)
    chosen = config.validation
    found = RunPrompts(
        prompts=await tasks.prompts("train", config.trainer.prompts_per_step),
        held_out=await tasks.held_out(chosen, chosen.due_sets, tasks=bool(chosen.every)),
    )
    run.warnings += [note for data in tasks.data.values() for note in data.notes.items()]
    check_loaders(config, tasks.loaders, parts.sampler)
    at_hand = {name: part for name, part in found.prompts.items() if name not in tasks.loaders}
    await judge_one_reply(tasks.environments, at_hand, hints="hints" in parts.needs)
    await parts.data_plane.started()
    check_reader(parts.data_plane, config.data_plane.name)
    model = await _start_model(run, found)
    scores = dict(parts.scores)
    for name in (name for name in scores if scores[name].model):
        scores[name] = evolve(scores[name], weights=await fetched(scores[name].model, run.trackers.status))
    if config.rollout.max_tokens == 0:
        parts.config = config = with_max_tokens(config, model.max_tokens)
        run.directory.complete_config(config)
    check_lengths(config.rollout, model.positions)

    async def load_renderer() -> tuple[Renderer, RunPrompts]:
        """Load the renderer; return it with the prompts that are short enough."""
        sections = [each for each in (config.engine, chosen.engine) if each is not None]
        renderer = await asyncio.to_thread(parts.renderer, model.path, sections)
        kept, messages = await found.short_enough(
            config.rollout.max_prompt_tokens, tasks.environments, renderer, tasks.loaders
        )
        messages |= await kept.spelling(tasks.environments, renderer)
        run.warnings += messages.items()
        return renderer, kept

    renderer = None
    if has_tokenizer(config, model) if config.rollout.max_prompt_tokens else model.prepare is None:
        renderer, found = await load_renderer()
    sizes = {name: tasks.size(name, part) for name, part in found.prompts.items()}
    parts.config = config = with_steps(config, sizes)
    trainer = _trainer(run, model, scores, devices)
    engines: dict[str, Any] = {}
    for key, section in parts.engines.items():
        trains = key == "engine"
        logs = run.directory.logs if trains else run.directory.logs / "validation"
        logs.mkdir(exist_ok=True)
        colocated = config.pipeline.max_staleness > 0 or not trains
        setup = parts.engine_setup(section, model.path, logs=logs, colocated=colocated)
        setup = evolve(setup, shares_gpu=key in devices.shared)
        engines[key] = parts.engine(section, setup, devices.engines.get(key, ()))
    starting = [each.started() for each in engines.values() if hasattr(each, "started")]
    await gather([trainer.started(), *starting])
    if renderer is None:
        renderer, found = await load_renderer()
    pipeline = await _pipeline(run, found, renderer, trainer, engines, Path(model.path))
    pipeline.resting = [engines[key] for key in sorted(devices.shared) if hasattr(engines[key], "rest")]
    return pipeline


async def _pipeline(
    run: Launch,
    found: RunPrompts,
    renderer: Renderer,
    trainer: Trainer,
    engines: Mapping[str, Engine],
    start: Path,
) -> Pipeline:
    """Connect the started parts; restore them from the checkpoint of a resumed run.

    ``start`` is the directory of the model that the run starts from.
    """
    parts, config, prompts, held_out = run.parts, run.parts.config, found.prompts, found.held_out
    environments = run.tasks.environments
    found_odd = await first_look(config.rollout, environments, prompts, renderer, held_out)
    found_odd |= await asyncio.to_thread(leaks, prompts, held_out)
    for remark in parts.remarks:
        if remark.costs:
            found_odd["off_policy"] = remark.message
        else:
            run.trackers.status(remark.message)
    if run.found is not None and (changed := changed_schedule(run.found, config.trainer)):
        found_odd["schedule"] = changed
    run.warnings += found_odd.items()
    buffer, places, ahead = parts.buffer(), parts.places(), run.tasks.loaders
    for loader in ahead.values():
        loader.status = run.trackers.status
        loader.slots = (config.pipeline.max_staleness + 1) * config.trainer.prompts_per_step
    loaders: Loaders = {
        name: ahead[name] if name in ahead else IndexedLoader(name, part, seed=config.seed)
        for name, part in prompts.items()
    }
    stream = PromptStream(sampler=parts.sampler, loaders=loaders, name=config.sampler.name)
    _restore(run, checkpoint.restore, buffer, loaders, stream)
    if run.found is not None:  # a dataloader that does not give its rows again is an error now
        with wrong_input():
            await gather(loader.first(1) for loader in loaders.values())
    engine = WeightsTrackingEngine(engines["engine"], partial(_check_held, run, engines["engine"]))
    own = engines.get("validation.engine")
    validation = parts.validation(
        held_out, own or engine, renderer, places, emit=run.emit, last=config.trainer.steps
    )
    _restore(run, checkpoint.restore_validation, validation)
    if run.found is not None:
        validation.measured = checkpoint.measured(run.found)
    validate: Validate = validation
    watch: list[Watch] = [trainer.watch, run.trackers.watch]
    if own is not None:
        section = parts.engines["validation.engine"]
        validate = DedicatedValidator(
            measure=validation,
            engine=own,
            trained=engine,
            emit=run.emit,
            last=config.trainer.steps,
            pauses=config.validation.pause,
            deadline=SYNC_ATTEMPTS * section.deadline + SYNC_GRACE,
            canary_tolerance=parts.canary_tolerance(section),
        )
        watch.append(validate.watch)
    pipeline = Pipeline(
        buffer=buffer,
        prompts=stream,
        engine=engine,
        playing=evolve(parts.playing(environments, renderer), places=places),
        plane=parts.data_plane,
        learning=parts.learning(),
        trainer=trainer,
        checks=evolve(parts.checks(environments, prompts, renderer), watch=watch),
        schedule=parts.schedule(began=run.began),
        emit=run.emit,
        flush=run.trackers.flush,
        readings=lambda: {
            **run.trackers.metrics(),
            **run.trackers.incidents.read(),
            **readings.of_engines(engines),
            **readings.memory(),
        },
        validate=validate,
        validate_first=validation.measured < run.step,
        save=_save(run, trainer, buffer, loaders, stream, validation, engine, start),
    )
    run.trackers.on_stop(partial(pipeline.stop, at_leisure=True))
    if config.trainer.stop_when:
        run.after.append(stop_at(Goal.parse(config.trainer.stop_when), pipeline, run.goal))
    return pipeline


def _restore(run: Launch, restore: Callable[..., Iterable[str]], *parts: Any) -> None:
    """Restore parts from the checkpoint of a resumed run, and report what was not restored."""
    if run.found:
        for note in restore(run.found.directory, *parts):
            run.trackers.status(f"resuming: {note}")


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


async def _start_model(run: Launch, found: RunPrompts) -> StartModel:
    """Return the model that the run starts from; make it if necessary."""

    async def prompts() -> Mapping[str, Sequence[Prompt]]:
        return found.prompts

    start = await run.parts.model.start_model(
        ModelRequest(
            directory=run.directory.model,
            prompts=prompts,
            environments=run.tasks.environments,
            seed=run.parts.config.seed,
            status=run.trackers.status,
        )
    )
    if start.prepare is None:  # it may have just been downloaded
        odd = await asyncio.to_thread(run.parts.odd_files, Path(start.path))
        run.warnings += [("model", each) for each in odd]
    return start


def _trainer(run: Launch, model: StartModel, scores: Mapping[str, ScoreConfig], devices: Devices) -> Trainer:
    """Make the trainer, which makes the model if necessary."""
    run.trackers.status(model.doing)
    setup = evolve(
        run.parts.trainer_setup(model.path),
        scores=scores,
        prepare=model.prepare,
        resume_from=str(run.found.directory) if run.found else None,
        transport=run.parts.transport(),
        env_vars=devices.trainer,
        shares_gpu=bool(devices.shared),
        profile=str(run.directory.profile),
        log=str(run.directory.logs / "trainer.log"),
    )
    return run.parts.trainer(setup)


def _import_what_is_needed_soon() -> None:
    """Import a slow module while the environments start; a trainer in a thread may import it, too."""
    with contextlib.suppress(ImportError):  # transformers 4 has other modules; this only saves time
        importlib.import_module("transformers.tokenization_utils_tokenizers")


# ---------------------------------------------------------------------------------- parts of the loop


def _check_held(run: Launch, engine: Engine, weights: Weights) -> None:
    """Raise ConfigError if the engine of a resumed run holds other weights than before."""
    if (found := run.found) is None:
        return
    try:
        now = run.parts.published(engine, weights, weights.version)
        check_held(run.directory.path, Published.read(found.directory / "trainer"), now)
    except BaseException:
        run.directory.take_back_config()
        raise


def _save(
    run: Launch,
    trainer: Trainer,
    buffer: Buffer[Prompt, Group],
    loaders: Loaders,
    stream: PromptStream,
    validation: Validation,
    engine: WeightsTrackingEngine,
    start: Path,
) -> Save:
    """Return the function that writes a checkpoint."""
    parts, found = run.parts, run.found
    config, process = parts.config, identity(parts.config, start)
    before = None if found is None else Published.read(found.directory / "trainer")

    async def save(step: int, failure: Failure | None) -> Written:
        cut = checkpoint.cut(buffer, stream, validation, failure)
        states = run.trackers.states()  # at the moment of the cut
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
            published=before
            if engine.weights is None
            else parts.published(engine, engine.weights, version=step),
            keep=config.checkpoint.keep if failure is None else None,
            spared=run.retention.spared,
        )

    return save
