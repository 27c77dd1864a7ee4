"""``train``, ``validate`` and ``session``: functions for scripts and notebooks."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

from grpo_core.api.arguments import arguments, configuration, names, trackers
from grpo_core.api.run import Run
from grpo_core.app import build
from grpo_core.app.launch import configure_target, continued, new_run
from grpo_core.app.model_sources import find_target
from grpo_core.app.session import Session, prepare, start_session
from grpo_core.app.stopping import Stop
from grpo_core.config import merge
from grpo_core.contracts.errors import ConfigError, GrpoError, wrong_input
from grpo_core.plugins.files import importing_file
from grpo_core.processes.aio import to_the_end
from grpo_core.processes.interrupts import received
from grpo_core.processes.secrets import inert

T = TypeVar("T")


class _Short(contextlib.ContextDecorator):
    """Raises errors of ours without the frames of the run, which its log has."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, GrpoError):
            error.__cause__ = error.__traceback__ = None
            error.__suppress_context__ = True


PathLike = str | os.PathLike[str]
LISTENING = 0.2
"""Seconds between checks for ctrl-C while a run is on another thread."""
OPTION = re.compile(r"--(output|resume|env|only)(?: ([^\s:;,]+))?")
"""A command-line option that is an argument here, with its value."""


@_Short()
def train(
    config: PathLike | Mapping[str, Any] | None = None,
    *,
    env: Any = None,
    data: Any = None,
    listeners: Sequence[Any] = (),
    output: PathLike | None = None,
    resume: PathLike | None = None,
    no_plugins: Sequence[str] = (),
    **settings: Any,
) -> Run:
    """Train a model with asynchronous GRPO, as ``grpo-core train`` does; return the run.

    ::

        def exact(reply, answer):
            return float(reply.strip() == answer)

        run = grpo_core.train(env=exact, data=[{"prompt": "2+2=", "answer": "4"}], trainer={"steps": 50})

    Args:
        config: path of a TOML file, or its tables as a dict.
        env: the task to train on: the name of an environment ("math:sort", "./file.py:Class"), an environment
            or its class, or a reward function, or several of them as a list or as ``{task: env}``.  A reward
            function takes parameters by name (reply, answer, prompt, messages, info, episode, or any other
            field of its data) and returns a number, ``Feedback``, or None for a reply without a reward; an
            async one is called for 64 replies at once.  An object runs on a thread of this process: code that
            hangs cannot be killed there, as it can be if it is given by name.
        data: prompts of one task: a list of texts, dicts with "prompt" and "answer", or ``Prompt``; a data
            set, a loader, or a function of the split that makes one; the path of a file, or the name of a
            dataloader.  An endless loader is read as far as the run needs.
            ``{"train": ..., "validation": ...}`` gives held-out prompts, too.
        listeners: functions that are called with every event (``grpo_core.events``), or trackers.  Each runs
            on a separate thread, and may be slow.
        output: directory of the run, which must be empty or new.  Default: runs/NAME.
        resume: directory of a run, or a ``Run``, that continues; objects have to be given again.
        no_plugins: installed plugins that are not loaded.
        **settings: sections of the configuration, as in ``trainer={"steps": 50}``, and ``seed``.  A text
            selects the main value of a section, as in ``model="Qwen/Qwen3-0.6B"`` or ``loss="gspo"``;
            sampler, validation and advantage may be objects or functions, and loss a function of a file.
            ``steps``, ``lr``, ``prompts_per_step``, ``group_size``, ``max_tokens`` and ``temperature`` may
            stand alone.  ``reward`` is a reward function in place of ``env``, or a list of them whose rewards
            are added: ``reward=[exact, (short, 0.1)]``.

    Works inside a running event loop and in Jupyter, where it blocks until the run ends.  Ctrl-C ends the
    run after its step with a checkpoint, and raises KeyboardInterrupt.

    Raises GrpoError, whose message says what is wrong; ConfigError before anything costly has started.  A
    failed run keeps the newest finished step, as the error's ``__notes__`` say.
    """
    _not_in_an_import()
    heard = trackers(listeners)
    with _as_arguments():
        asked, block = arguments(env, data, settings), names("no_plugins", no_plugins)
        if resume is None:
            table = configuration(config)
            target = None if output is None else Path(output)
            layers = [asked.defaults(table), table]
            start = new_run(layers, asked.table, block, output=target, offers=asked.offers)
        elif config is not None or output is not None:
            raise ConfigError("resume continues a run as it was configured: leave out config and output")
        else:
            start = continued(Path(resume), asked.table, block, offers=asked.offers)
    for note in start.notes:
        print(inert(_as_argument(note)), flush=True)
    if start.finished is not None and start.finished.complete:
        start.directory.unlock()
        return Run(start.directory.path)
    stop, again = Stop(), f"train(resume={str(start.directory.path)!r}) continues"
    try:
        outcome = _finished(build.train(start, listeners=heard, stop=stop), stop)
    except Exception as error:
        if start.directory.has_trained():
            error.add_note(f"{again} the run")
        raise
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"{again} the run") from None
    finally:
        start.directory.unlock()
        gc.unfreeze()
    if outcome.reason == "interrupted":
        raise KeyboardInterrupt(f"the run ended after step {outcome.step}; {again} it")
    return Run(start.directory.path)


@_Short()
def validate(
    model: PathLike | None = None,
    *,
    env: Any = None,
    data: Any = None,
    only: Sequence[str] = (),
    step: int | None = None,
    output: PathLike | None = None,
    no_plugins: Sequence[str] = (),
    **settings: Any,
) -> dict[str, dict[str, float]]:
    """Measure a model, or a run's checkpoint, as ``grpo-core validate`` does.

    Args:
        model: directory of a run or of a model, a hub id, or a ``Run``; an engine of a hosted model needs
            none.
        env, data, settings: as for ``train``; by default the run's.  The list or path that is given
            as data holds the held-out prompts.
        only: names of the tasks and validation sets of the run that are measured; without names all are.
        step: step of the run's checkpoint; by default the newest one.
        output: directory for the results and the rollouts.  Default: RUN/validated/DATE.
        no_plugins: installed plugins that are not loaded.

    Returns the metrics by task.  Raises GrpoError as ``train`` does.
    """
    _not_in_an_import()
    by_split = data if isinstance(data, Mapping) or data is None else {"train": data, "validation": data}
    with _as_arguments():
        asked = arguments(env, by_split, settings)
        measurement = prepare(
            None if model is None else os.fspath(model),
            asked.table,
            tasks=env is not None,
            only=names("only", only),
            step=step,
            output=None if output is None else Path(output),
            block=names("no_plugins", no_plugins),
            offers=asked.offers,
        )
    stop = Stop()

    async def measured() -> dict[str, Any]:
        task = asyncio.current_task()
        assert task is not None
        with stop.heard(task.cancel):
            return await measurement.play(lambda text: None)

    report = _finished(measured(), stop)
    return {task: dict(metrics) for task, metrics in report["results"].items()}


@contextlib.asynccontextmanager
async def session(
    config: PathLike | Mapping[str, Any] | None = None,
    *,
    model: PathLike | None = None,
    env: Any = None,
    data: Any = None,
    status: Callable[[str], None] = lambda text: None,
    no_plugins: Sequence[str] = (),
    **settings: Any,
) -> AsyncIterator[Session]:
    """Start an engine and the environments of a configuration, and play without a trainer.

    ::

        async with grpo_core.session(env="math:sort", model="runs/sort") as session:
            prompts = await session.prompts(split="validation")
            for (rollout,) in await session.play(prompts[:8]):
                print(rollout.reward, rollout.messages[-1])

    Args:
        config, env, data, no_plugins, settings: as for ``train``.
        model: directory of a run, whose newest checkpoint and configuration are taken; or a model.  By
            default the model that training would start from.
        status: called with progress and warnings.

    Raises GrpoError, whose message says what is wrong; ConfigError before anything costly has started.
    """
    with _as_arguments(), wrong_input():
        asked, block = arguments(env, data, settings), names("no_plugins", no_plugins)
        table = configuration(config)
        changes = merge(table, asked.table)
        name = None if model is None else os.fspath(model)
        target = find_target(name, changes.get("plugins"), block)
        setup = configure_target(
            target, changes, block, asked.offers, tasks=env is not None, below=[asked.defaults(table)]
        )
    async with start_session(setup, target, status) as started:
        yield started


@contextlib.contextmanager
def _as_arguments() -> Iterator[None]:
    """Replace command-line options in error messages by the arguments of a call."""
    try:
        yield
    except ConfigError as error:
        error.args = (_as_argument(str(error)),)
        raise


def _as_argument(text: str) -> str:
    named = OPTION.sub(lambda found: f"{found[1]}={found[2]}" if found[2] else found[1], text)
    return named.replace("--set ", "")


def _not_in_an_import() -> None:
    if (path := importing_file.get()) is not None:
        raise ConfigError(
            f"{path} trains when it is imported, and a run has imported it for a function in it: put the "
            'call under if __name__ == "__main__":'
        )


def _finished(main: Coroutine[Any, Any, T], stop: Callable[[], None]) -> T:
    """Run a coroutine to its end, on a separate thread if an event loop is running on this one.

    Args:
        stop: requests the coroutine's end; called for each signal meanwhile.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return to_the_end(main)
    with ThreadPoolExecutor(1, "grpo-core") as thread, received(lambda name: stop()):
        running = thread.submit(to_the_end, main)
        while not running.done():  # handlers of signals run between two waits, whichever thread got them
            wait([running], timeout=LISTENING)
        return running.result()
