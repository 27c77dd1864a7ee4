"""Trains or validates by a configuration, from start to end."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from attrs import asdict, evolve, frozen

from grpo_core.app import provenance
from grpo_core.app.build import RunContext, build_pipeline
from grpo_core.app.parts import Parts
from grpo_core.app.preflight import interval_of
from grpo_core.app.profile import ProfileTracker
from grpo_core.app.resume import Over
from grpo_core.app.session import started_tasks
from grpo_core.config import Config, as_table
from grpo_core.errors import describe, traceback_of
from grpo_core.events import ErrorRaised, Event, RunEnded, RunStarted, Validated, WarningRaised
from grpo_core.garbage import spare_the_collector
from grpo_core.incidents import report, reported_to
from grpo_core.interrupts import handle, received
from grpo_core.loop import checkpoint
from grpo_core.loop.buffer import BufferStatistics
from grpo_core.loop.pipeline import Pipeline
from grpo_core.loop.retention import Retention
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import Tracker
from grpo_core.reporting.room import DiskRoom
from grpo_core.reporting.selection import make_trackers
from grpo_core.reporting.trackers import Trackers
from grpo_core.run_directory import RunDirectory
from grpo_core.timeline import Timeline, taken_down
from grpo_core.versions import Interval

T = TypeVar("T")


@frozen(kw_only=True)
class Outcome:
    """The end of a run."""

    reason: str
    step: int
    steps: int
    """Number of steps of the whole run."""
    directory: Path
    first: Mapping[str, Mapping[str, float]]
    """Metrics of each task in the first validation of the run, which an earlier process may have made."""
    last: Mapping[str, Mapping[str, float]]
    """Metrics of each task in the last one."""
    seconds: float
    proved: int | None = None
    """The newest version that the canary has proved the engine to use."""
    unproved: int = 0
    """Number of weight syncs since then, or since the first one."""


class Stop:
    """Ends a run on request, from any thread: after its step with a checkpoint, the second time at once."""

    def __init__(self) -> None:
        self._ask: Callable[[], object] | None = None
        self._asked = 0
        """Number of requests that nobody has heard yet."""
        self._lock = threading.RLock()  # a signal's handler may interrupt itself

    def __call__(self) -> None:
        """Ask for the end."""
        with self._lock:
            if self._ask is not None:
                self._ask()
            else:
                self._asked += 1

    @contextlib.contextmanager
    def heard(self, ask: Callable[[], object]) -> Iterator[None]:
        """Call ``ask`` in the running event loop for each request, earlier ones included."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._ask = partial(loop.call_soon_threadsafe, ask)
            for _ in range(self._asked):
                self._ask()
            self._asked = 0
        try:
            yield
        finally:
            self._ask = None


async def train(
    config: Config,
    run: RunDirectory,
    *,
    host: PluginHost,
    resume: checkpoint.Found | None = None,
    over: Over | None = None,
    warnings: Sequence[WarningRaised] = (),
    listeners: Mapping[str, Tracker] = MappingProxyType({}),
    stop: Stop | None = None,
) -> Outcome:
    """Train until the last step, a signal, or an error.

    On the main thread, SIGINT, SIGTERM and SIGHUP end the run after its step with a checkpoint; a second one
    ends it at once.  Raises the root cause of what failed; children are gone then, and checkpoints complete.

    Args:
        over: the end of a run that has nothing left to train; then only its trackers start.
        warnings: are raised when the run has started.
        listeners: trackers besides those of the configuration, by name.
        stop: does what signals do.
    """
    began = time.monotonic()
    run.forget_end()
    await asyncio.to_thread(
        provenance.write, run.path, config, host, resumed_from=resume.step if resume else None
    )
    watched = _watched(config, run, host, resume, listeners)
    with _interrupts(watched.trackers.status, stop or Stop()) as interruptible:
        return await _train(config, run, host, resume, over, warnings, watched, interruptible, began)


async def _train(
    config: Config,
    run: RunDirectory,
    host: PluginHost,
    resume: checkpoint.Found | None,
    over: Over | None,
    warnings: Sequence[WarningRaised],
    watched: _Watched,
    interruptible: Callable[[Pipeline], None],
    began: float,
) -> Outcome:
    """Train with trackers that have started, and end them.

    Args:
        interruptible: is called with the pipeline.
        began: start of the program.
    """
    trackers, emit = watched.trackers, watched.trackers.emit
    timeline = Timeline(tell=trackers.stage)
    step = resume.step if resume else 0
    try:
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(reported_to(trackers.report))
            stack.enter_context(taken_down(timeline))
            timeline.stage("start")
            around = RunContext(
                directory=run,
                plugins=host,
                placement=Parts(config, host).placement(),
                resume=resume,
                trackers=trackers,
                retention=watched.retention,
                began=began,
                stack=stack,
                warnings=list(warnings),
            )
            if over is None:
                pipeline = await _start(config, around)
                interruptible(pipeline)
                spare_the_collector()
                reason, steps = await pipeline.run(), pipeline.buffer.num_steps
                step = pipeline.buffer.step
                proved, unproved = pipeline.proved, pipeline.unproved
            else:
                reason, steps = over.reason, over.steps
                proved, unproved = None, 0
                config = evolve(config, trainer=evolve(config.trainer, steps=steps))
                emit(_started(config, around, over.buffer))
    except BaseException as error:
        emit(timeline.extended(step))
        _report(error, emit, max(step, trackers.step))
        raise
    else:
        emit(timeline.extended(step))
        emit(RunEnded(step=step, reason=reason))
    finally:
        await trackers.close()
    trackers.check()
    if trackers.ended:
        run.mark_ended(reason, step)
    return Outcome(
        reason=reason,
        step=step,
        steps=steps,
        directory=run.path,
        first=watched.scores.first,
        last=watched.scores.last,
        seconds=time.monotonic() - began,
        proved=proved,
        unproved=unproved,
    )


@frozen
class _Watched:
    """The trackers of a run, with those that the run itself asks."""

    trackers: Trackers
    scores: Scores
    retention: Retention


def _watched(
    config: Config,
    run: RunDirectory,
    host: PluginHost,
    resume: checkpoint.Found | None,
    listeners: Mapping[str, Tracker],
) -> _Watched:
    """Start the trackers of the run itself, of the configuration, and the listeners."""
    step = resume.step if resume else 0
    scores = Scores(run.first_scores() if resume else {})
    kept = config.checkpoint
    steps = sys.maxsize if config.trainer.epochs else config.trainer.steps
    best = kept.best.removeprefix("-")
    measured = Interval(interval_of(best, config, "checkpoint.best")[1]) if best else Interval()
    retention = Retention(
        run.checkpoints,
        every=kept.keep_every,
        best=kept.best,
        due=partial(measured.due, last=steps),
        step=step,
    )
    trackers = Trackers()
    room = DiskRoom(run.path, steps, trackers.emit)
    own: dict[str, Tracker] = {"scores of the run": scores, "room on the disk": room}
    if kept.best:
        own["retention of checkpoints"] = retention
    if config.trainer.profile:
        own["profile"] = ProfileTracker(run.profile, config.trainer.profile)
    info = run.info(config, *((resume.step, checkpoint.measured(resume)) if resume else (None,)))
    made = make_trackers(config, host, partial(trackers.info, info))
    trackers.add({**own, **made, **listeners}, checkpoint.read_trackers(resume.directory) if resume else {})
    return _Watched(trackers, scores, retention)


def _report(error: BaseException, emit: Callable[[Event], None], step: int) -> None:
    """Emit how a run ended that did not end by itself."""
    interrupted = isinstance(error, asyncio.CancelledError)
    if not interrupted:
        emit(ErrorRaised(step=step, message=describe(error), traceback=traceback_of(error)))
    emit(RunEnded(step=step, reason="interrupted" if interrupted else "failed"))


async def _start(config: Config, run: RunContext) -> Pipeline:
    """Start every part of a run, and tell the trackers that the run has started."""
    run.trackers.status("starting the environments")
    ranks = 0 if Parts(config, run.plugins).trainer_here else config.trainer.ranks
    around = started_tasks(
        config,
        run.placement,
        run.plugins,
        sets=config.validation.due_sets,
        logs=run.directory.logs,
        more=ranks,
    )
    try:
        run.tasks = await run.stack.enter_async_context(around)
        config, pipeline = await build_pipeline(config, run)
    except BaseException:
        run.directory.take_back_config()  # a resumed run does not keep changes with which it cannot start
        raise
    run.emit(_started(config, run, pipeline.buffer.statistics()))
    for warning in run.warnings:
        run.emit(warning)
    for reason in run.resume.passed_over if run.resume else ():
        report("passed_over", "checkpoints", f"passed over {reason}")
    return pipeline


def _started(config: Config, context: RunContext, buffer: BufferStatistics) -> RunStarted:
    return RunStarted(
        step=context.step,
        directory=str(context.directory.path),
        config=as_table(config),
        resumed=context.resume is not None,
        buffer=asdict(buffer),
        manifest=checkpoint.manifest_digest(context.resume.directory) if context.resume else "",
        measured=checkpoint.measured(context.resume) if context.resume else -1,
    )


class Scores(Tracker):
    """The metrics of each task in the first and the last validation.

    Args:
        first: metrics of the run's first validation by task, if an earlier process made it.
    """

    def __init__(self, first: Mapping[str, Mapping[str, float]]) -> None:
        self.first: dict[str, Mapping[str, float]] = dict(first)
        self.last: dict[str, Mapping[str, float]] = {}

    def event(self, event: Event) -> None:
        if isinstance(event, Validated):
            self.first = {**event.results, **self.first}
            self.last |= event.results


@contextlib.contextmanager
def _interrupts(status: Callable[[str], None], stop: Stop) -> Iterator[Callable[[Pipeline], None]]:
    """End the run on a signal and on ``stop``: after its step once its pipeline is known, else at once.

    A second one ends it at once, unless one of them is SIGHUP: a terminal that is closed may send it twice,
    and a session that ends sends SIGTERM with it.  Yields a function that takes the pipeline.
    """
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    running: list[Pipeline] = []
    asked: list[str] = []

    def end(why: str) -> None:
        asked.append(why)
        again = len(asked) > 1
        if again and (why == "SIGHUP" or set(asked[:-1]) == {"SIGHUP"}):
            return
        if again or not running:
            main.cancel()
            return
        when = "after this step" if running[0].in_step else "now"
        status(f"{why}: ending {when}, with a checkpoint (once more: at once)")
        running[0].stop()

    def take(pipeline: Pipeline) -> None:
        running.append(pipeline)
        handle()  # a library that was imported meanwhile may have handlers of its own

    def receive(name: str) -> None:
        loop.call_soon_threadsafe(end, name)

    with stop.heard(partial(end, "interrupted")), received(receive):
        yield take
