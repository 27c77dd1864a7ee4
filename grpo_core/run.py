"""Trains, or measures, what a configuration says, and sees it through to its end."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, evolve, frozen

from grpo_core import checkpoint
from grpo_core.assembly import assemble, make_engine, make_validation
from grpo_core.config import Config, as_table
from grpo_core.errors import ConfigError, describe
from grpo_core.events import ErrorRaised, Event, RunEnded, RunStarted, Validated
from grpo_core.metrics import headline
from grpo_core.pipeline import Pipeline
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import Tracker
from grpo_core.rendering import Renderer
from grpo_core.reporting.selection import make_trackers
from grpo_core.reporting.trackers import Trackers
from grpo_core.run_directory import RunDirectory
from grpo_core.tasks import Tasks
from grpo_core.training.process import thread_count


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


async def train(
    config: Config,
    run: RunDirectory,
    *,
    host: PluginHost,
    block: Sequence[str] = (),
    resume: checkpoint.Found | None = None,
) -> Outcome:
    """Train until the last step, a signal, or an error.

    SIGINT and SIGTERM end the run after its step with a checkpoint; a second one ends it at once.  Raises
    the root cause of what failed; children are gone then, and checkpoints are complete.
    """
    scores = Scores()
    info = run.info(config, resume.step if resume else None)
    trackers = Trackers({"scores of the run": scores, **make_trackers(config.tracking, host, info)})
    emit = trackers.emit
    began = time.monotonic()
    pipeline: Pipeline | None = None
    step = resume.step if resume else 0
    try:
        async with contextlib.AsyncExitStack() as stack:
            trackers.status("starting the environments")
            tasks = await stack.enter_async_context(Tasks.start(config, block, run.logs))
            pipeline = await assemble(config, run, host, tasks, resume, trackers, stack)
            emit(
                RunStarted(
                    step=step,
                    directory=str(run.path),
                    config=as_table(config),
                    resumed=bool(resume),
                    buffer=asdict(pipeline.buffer.statistics()),
                )
            )
            with _signals(pipeline, trackers.status):
                reason = await pipeline.run()
            step = pipeline.buffer.step
    except asyncio.CancelledError:
        emit(RunEnded(step=step, reason="interrupted"))
        raise
    except BaseException as error:
        emit(
            ErrorRaised(
                step=step, message=describe(error), traceback="".join(traceback.format_exception(error))
            )
        )
        emit(RunEnded(step=step, reason="failed"))
        raise
    else:
        emit(RunEnded(step=step, reason=reason))
    finally:
        await trackers.close()
    trackers.check()
    return Outcome(
        reason=reason,
        step=step,
        directory=run.path,
        first=scores.first,
        last=scores.last,
        seconds=time.monotonic() - began,
    )


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
    from grpo_core.weights.layout import load_tensors
    from grpo_core.weights.shm import SharedMemoryWriter

    config = evolve(config, engine=config.validation.engine or config.engine)
    async with contextlib.AsyncExitStack() as stack:
        status("starting the environments")
        tasks = await stack.enter_async_context(Tasks.start(config, block, None))
        held_out = await tasks.prompts(config, "validation")
        if empty := [task for task, prompts in held_out.items() if not prompts]:
            raise ConfigError(f"task {', '.join(map(repr, empty))}: there are no prompts for validation")
        engine = make_engine(
            config, host, str(model), None, threads=thread_count(config.engine.threads, False)
        )
        stack.push_async_callback(engine.aclose)
        status("loading the model")
        renderer = await asyncio.to_thread(
            Renderer.load, str(model), trust_remote_code=config.model.trust_remote_code
        )
        writer = SharedMemoryWriter()
        await engine.update_weights(writer.write(version, load_tensors(model)))
        status("validating")
        measure = make_validation(config, host, engine, tasks, renderer, held_out)
        results: Mapping[str, Mapping[str, float]] = await measure(version)
        return results


# ---------------------------------------------------------------------------------- around it


class Scores(Tracker):
    """The first and the last validation score of each task."""

    def __init__(self) -> None:
        self.first: dict[str, float] = {}
        self.last: dict[str, float] = {}

    def event(self, event: Event) -> None:
        if isinstance(event, Validated):
            for task, metrics in event.results.items():
                if (name := headline(metrics)) is not None:
                    self.first.setdefault(task, metrics[name])
                    self.last[task] = metrics[name]


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
