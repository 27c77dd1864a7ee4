"""A session plays the tasks of a configuration without training; a measurement validates in one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from grpo_core.app import making, model_sources, provenance
from grpo_core.app.launch import configure_target, new_directory, unused
from grpo_core.app.make import preflight
from grpo_core.app.making import RunSetup
from grpo_core.app.prompts import short_enough
from grpo_core.app.tasks import Tasks
from grpo_core.config import Config, ValidationConfig, as_toml
from grpo_core.contracts import protocols
from grpo_core.contracts.errors import ConfigError, wrong_input
from grpo_core.contracts.events import Event, ValidationPlayed, WarningRaised
from grpo_core.contracts.incidents import lines_of_incidents, reported_to
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.protocols import Engine
from grpo_core.contracts.records import Group, Prompt, Rollout
from grpo_core.engines.text import PlayingText, TextRenderer, without_tokens
from grpo_core.loop.metrics import validation_metrics
from grpo_core.loop.rollout import RolloutRequest, derive_seed, play
from grpo_core.plugins.host import NO_OFFERS, Offers
from grpo_core.processes.aio import gather, in_own_loop
from grpo_core.processes.child import scratch_directory
from grpo_core.processes.memory import thread_count
from grpo_core.processes.secrets import masked
from grpo_core.reporting.files import metrics_line
from grpo_core.reporting.stored import write_validation
from grpo_core.storage.published import Published
from grpo_core.storage.run_directory import CONFIG
from grpo_core.text.rendering import Renderer
from grpo_core.validation.runner import HeldOut, Results


@frozen(kw_only=True)
class Session:
    """A model and the environments of its tasks.  ``grpo_core.session`` starts and ends it."""

    config: Config
    """Configuration of the session."""
    engine: Engine
    """Engine that holds the model's weights."""
    renderer: protocols.Renderer
    """Renders messages to tokens by the model's chat template."""
    environments: Mapping[str, EnvironmentClient]
    """Environments by task."""
    _tasks: Tasks

    async def prompts(self, task: str | None = None, *, split: str = "train") -> Sequence[Prompt]:
        """Return a task's prompts; the default is the only task.  Raises ConfigError, EnvironmentError."""
        if task is None and len(self.environments) > 1:
            raise ConfigError(f"name one of the tasks {', '.join(self.environments)}")
        if task is not None and task not in self.environments:
            raise ConfigError(f"there is no task {task!r}; there are {', '.join(self.environments)}")
        name = task or next(iter(self.environments))
        return (await self._tasks.prompts(split, tasks=[name]))[name]

    async def play(
        self,
        prompts: Sequence[Prompt],
        *,
        group_size: int = 1,
        seed: int = 0,
        temperature: float | None = None,
        environments: Mapping[str, EnvironmentClient] | None = None,
    ) -> list[list[Rollout]]:
        """Play each prompt ``group_size`` times, all at once; return the rollouts of each prompt.

        Args:
            seed: the same seed gives the same rollouts from the same model.
            temperature: None is the temperature of training.
            environments: other environments to judge the rollouts, by task.

        An unfinished rollout has no reward, and the reason in ``error``.  Raises ConfigError for a prompt of
        another task, and EngineError.
        """
        for prompt in prompts:
            if prompt.environment not in self.environments:
                raise ConfigError(
                    f"prompt {prompt.id!r} is of task {prompt.environment!r}, and this session has "
                    f"{', '.join(self.environments)}; play the prompts that session.prompts() returns"
                )
        sampling = making.sampling_params(self.config.rollout)
        if temperature is not None:
            sampling = evolve(sampling, temperature=temperature)

        async def group(prompt: Prompt) -> list[Rollout]:
            requests = [
                RolloutRequest(
                    prompt=prompt, seed=derive_seed(seed, prompt.id, number), group=f"{seed}:{prompt.id}"
                )
                for number in range(group_size)
            ]
            rollouts = await play(
                requests,
                engine=self.engine,
                environments=environments or self.environments,
                renderer=self.renderer,
                sampling=sampling,
                deadline=self.config.rollout.deadline,
            )
            text = isinstance(self.renderer, TextRenderer)
            return [without_tokens(rollout) if text else rollout for rollout in rollouts]

        return list(await gather(group(prompt) for prompt in prompts))


@contextlib.asynccontextmanager
async def start_session(
    setup: RunSetup,
    target: model_sources.EvalTarget,
    status: Callable[[str], None],
    *,
    sets: Sequence[str] = (),
    look: Callable[[Tasks], Awaitable[Sequence[Prompt]]] | None = None,
) -> AsyncIterator[Session]:
    """Start the environments of all tasks, and an engine with the target's weights.

    Args:
        status: is called with messages to the user.
        sets: names of validation sets whose environments start as well.
        look: is called after the start of the environments, before the engine's; returns prompts to check the
            chat template with.

    Raises GrpoError if one of them cannot be started.
    """
    for note in target.notes:
        status(note)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(reported_to(lines_of_incidents(status)))
        status("starting the environments")
        tasks = await stack.enter_async_context(
            Tasks.start(setup.config, setup.plugins, setup.placement, sets=sets)
        )
        stack.push_async_callback(setup.aclose)
        first = await look(tasks) if look is not None else ()
        engine: Engine
        renderer: protocols.Renderer
        if setup.text_engine:
            (section,) = setup.engines.values()
            chosen = making.engine_setup(setup.config, section, "", logs=None, colocated=False, trains=False)
            renderer = TextRenderer()
            hosted: Any = setup.plugins.make("engine", section.name, chosen, **section.options)
            engine = PlayingText(hosted, renderer)
            stack.push_async_callback(engine.aclose)
        else:
            engine, renderer = await _start_engine(setup, target, tasks, first, stack, status)
        yield Session(
            config=setup.config,
            engine=engine,
            renderer=renderer,
            environments=tasks.environments,
            tasks=tasks,
        )


async def _start_engine(
    setup: RunSetup,
    target: model_sources.EvalTarget,
    tasks: Tasks,
    first: Sequence[Prompt],
    stack: contextlib.AsyncExitStack,
    status: Callable[[str], None],
) -> tuple[Engine, protocols.Renderer]:
    """Start an engine with the weights of the target, which ends with the stack.

    The model that training would start from is made if necessary, and removed with the stack.
    """
    from grpo_core.processes import cpu
    from grpo_core.training.building import saved_tensors
    from grpo_core.weights.shm import SharedMemoryWriter

    config = setup.config
    start = model_sources.StartModel(path=str(target.model))
    if target.model is None:
        request = model_sources.ModelRequest(
            directory=Path(stack.enter_context(scratch_directory())) / "model",
            prompts=partial(tasks.prompts, "train"),
            environments=tasks.environments,
            seed=config.seed,
            status=lambda message, part=None: status(message),
            check=partial(making.check_small_files, config, setup.engines.values(), prompts=first),
        )
        source = model_sources.Pretrained(target.hub) if target.hub else setup.model
        start = await source.start_model(request)
        if (make := start.prepare) is not None:
            status(start.doing)
            threads = thread_count(config.trainer.threads, config.pipeline.max_staleness > 0)  # as training

            def prepare() -> None:
                cpu.prepare(threads)
                make()

            await asyncio.to_thread(prepare)
    setup.config = config = model_sources.with_max_tokens(config, start.max_tokens)
    path, (section,) = Path(start.path), setup.engines.values()
    for _, odd in await preflight(config, setup.plugins, model=path):
        status(f"warning: {odd}")
    devices = await asyncio.to_thread(setup.placement.devices, None, setup.engines)  # may import torch
    (engine,) = making.engines(setup, devices, str(path)).values()
    if hasattr(engine, "started"):
        await engine.started()
    status("loading the model")
    renderer = await asyncio.to_thread(making.load_renderer, config.model, str(path), [section])
    writer = SharedMemoryWriter()
    stack.callback(lambda: writer)  # keeps the written weights, also for an engine that restarts
    tensors, base, dtype = await asyncio.to_thread(saved_tensors, path, target.adapters, config)
    weights = evolve(writer.write(target.version, tensors, dtype=dtype), base=base)
    if target.adapters is not None and (record := Published.read(target.adapters)) is not None:
        record.check((info.name, info.dtype, info.checksum) for info in weights.tensors)
    await engine.update_weights(weights)
    return engine, renderer


@frozen(kw_only=True)
class ValidationRun:
    """A validation that is ready to play."""

    config: Config
    """The configuration of all tasks."""
    setup: RunSetup
    """The components of the tasks to measure."""
    target: model_sources.EvalTarget
    only: Sequence[str]
    directory: Path
    """New directory of the results."""

    async def play(self, status: Callable[[str], None]) -> dict[str, Any]:
        """Play the rollouts; write and return the results.

        The rollouts are written also if the strategy fails.
        """
        played: list[ValidationPlayed] = []

        def receive(event: Event) -> None:
            if isinstance(event, ValidationPlayed):
                played.append(event)
            elif isinstance(event, WarningRaised):
                status(f"warning: {event.message}")

        try:
            results = await self._measured(status, receive)
        finally:
            for event in played:
                groups: Sequence[Group] = event.groups
                if self.setup.text_engine:  # it has no tokens
                    groups = [evolve(g, rollouts=tuple(map(without_tokens, g.rollouts))) for g in groups]
                write_validation(self.directory, event.version, groups)
            if not played:
                self.directory.rmdir()  # it ended before it had results
        validation = self.config.validation
        report = {
            "model": self.target.name,
            "version": self.target.version,
            "validation": {
                name: (validation.of_set(name) if name in validation.sets else validation).name
                for name in results
            },
            "results": results,
        }
        report = masked(report)
        provenance.write(self.directory, self.config, self.setup.plugins)
        line = metrics_line(self.target.version, time.time(), validation_metrics(results))
        text = json.dumps(report, indent=2)
        files = {CONFIG: as_toml(self.config), "metrics.jsonl": line, "results.json": f"{text}\n"}
        for name, text in files.items():
            (self.directory / name).write_text(text, encoding="utf-8")
        return report

    async def _measured(self, status: Callable[[str], None], emit: Callable[[Event], None]) -> Results:
        """Measure with the configuration's strategies, tasks and sets; return the metrics by task.

        Args:
            emit: receives the rollouts, as an event, also if the strategy fails.
        """
        setup, only, config = self.setup, self.only, self.setup.config
        sets = [name for name in config.validation.sets if name in only or not only]
        found: Sequence[HeldOut] = ()

        async def look(tasks: Tasks) -> Sequence[Prompt]:
            nonlocal found
            wanted = [name for name in config.tasks if name in only or not only]
            found = await tasks.held_out(config.validation, sets, wanted)
            if wanted and (empty := [name for name, own in found[0].prompts.items() if not own]):
                said = ", ".join(map(repr, empty))
                raise ConfigError(f"task {said}: there are no prompts for validation")
            return [prompt for part in found for own in part.prompts.values() for prompt in own[:1]]

        async with start_session(setup, self.target, status, sets=sets, look=look) as session:
            renderer = session.renderer
            if isinstance(renderer, Renderer):  # a model's renderer
                most = config.rollout.max_prompt_tokens
                _, found, messages = await short_enough(most, {}, found, {}, renderer)
                odd = await preflight(config, setup.plugins, renderer=renderer, held_out=found)
                for _, message in [*messages.items(), *odd]:
                    status(message)
            for part in found:
                there, wanted = max(map(len, part.prompts.values()), default=0), part.config.prompts
                if there < wanted != ValidationConfig().prompts:  # somebody has chosen it
                    status(f"validation.prompts = {wanted}: there are {there}, and all of them are measured")
            status("validating")
            playing = making.playing(session.config.rollout, session.environments, renderer, seed=config.seed)
            validation = making.validation(setup, playing, found, session.engine, emit=emit)
            return await validation.measure(self.target.version, validation.parts)


def prepare(
    target: str | None,
    changes: Mapping[str, Any],
    *,
    tasks: bool,
    only: Sequence[str] = (),
    step: int | None = None,
    output: Path | None,
    block: Sequence[str] = (),
    offers: Offers = NO_OFFERS,
) -> ValidationRun:
    """Prepare to measure a target; raises GrpoError for wrong input.

    Args:
        target: directory of a run or of a model, or a hub id; None: the engine needs no model.
        changes: a table that overrides the target's configuration.
        tasks: whether the changes define tasks.
        only: names of the tasks and sets to measure; empty for all.
        step: of the run's checkpoint; None is the newest one.
        output: directory for the results; None makes one next to the run, or in runs/.
        block: plugins that are not to be loaded.
        offers: objects of the calling program.
    """
    with wrong_input():
        chosen = model_sources.find_target(target, changes.get("plugins"), block, step)
    setup = configure_target(chosen, changes, block, offers, tasks=tasks)
    config = setup.config
    engine = (config.validation.engine or config.engine).name
    if setup.text_engine:  # of a run only the tasks are used
        chosen = evolve(chosen, name=f"engine {engine}", model=None, version=0, notes=())
    elif target is None:
        raise ConfigError(
            f"MODEL is missing: the engine {engine!r} needs its weights; name a run, the directory of a "
            "model or a hub id"
        )
    known = [*config.tasks, *config.validation.sets]
    if unknown := [name for name in only if name not in known]:
        raise ConfigError(
            f"--only {unknown[0]}: is neither a task nor a validation set; expected one of {', '.join(known)}"
        )
    if chosen.model is not None:
        in_own_loop(preflight(config, setup.plugins, model=chosen.model))
    if output is None:
        now = datetime.now().strftime("%Y%m%d-%H%M%S")
        in_run = Path(target, "validated", now) if target and Path(target, CONFIG).is_file() else None
        of_model = model_sources.RUNS / f"{'+'.join(config.tasks or config.validation.sets)}-validated-{now}"
        output = unused(in_run or of_model)
    if only and (chosen.model or chosen.hub):  # or it may be made from the prompts of all tasks
        needed = {*only, *(one.task for name, one in config.validation.sets.items() if name in only)}
        tasks_of = {name: one for name, one in config.tasks.items() if name in needed}
        setup.config = evolve(config, tasks=tasks_of)
    directory = new_directory(output)
    return ValidationRun(config=config, setup=setup, target=chosen, only=only, directory=directory)
