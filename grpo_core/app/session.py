"""A session: a model and the environments of its tasks, without training."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from grpo_core.app.model_sources import ModelRequest, StartModel, with_max_tokens
from grpo_core.app.parts import Parts, sampling_params
from grpo_core.app.target import EvalTarget
from grpo_core.app.tasks import Tasks
from grpo_core.config import Config
from grpo_core.contracts import protocols
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.incidents import lines_of_incidents, reported_to
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.protocols import Engine
from grpo_core.contracts.records import Prompt, Rollout
from grpo_core.engines.text import PlayingText, TextRenderer, without_tokens
from grpo_core.loop.rollout import RolloutRequest, derive_seed, play
from grpo_core.processes.aio import gather
from grpo_core.processes.child import scratch_directory
from grpo_core.processes.cores import thread_count
from grpo_core.storage.published import Published


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
        return await self._tasks.prompts_of(task or next(iter(self.environments)), split)

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
        sampling = sampling_params(self.config.rollout)
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
    parts: Parts,
    target: EvalTarget,
    status: Callable[[str], None],
    *,
    sets: Sequence[str] = (),
    look: Callable[[Tasks], Awaitable[None]] | None = None,
) -> AsyncIterator[Session]:
    """Start the environments of all tasks, and an engine with the target's weights.

    Args:
        status: is called with messages to the user.
        sets: names of validation sets whose environments start as well.
        look: is called after the start of the environments, before the engine's.

    Raises GrpoError if one of them cannot be started.
    """
    for note in target.notes:
        status(note)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(reported_to(lines_of_incidents(status)))
        status("starting the environments")
        tasks = await stack.enter_async_context(Tasks.start(parts, sets=sets))
        stack.push_async_callback(parts.aclose)
        if look is not None:
            await look(tasks)
        if parts.text_engine:
            engine, renderer = _start_text(parts, stack)
        else:
            start = StartModel(path=str(target.model))
            if target.model is None:
                start = await _start_model(parts, tasks, stack, status)
            parts.config = with_max_tokens(parts.config, start.max_tokens)
            engine, renderer = await _start_engine(parts, target, Path(start.path), stack, status)
        yield Session(
            config=parts.config,
            engine=engine,
            renderer=renderer,
            environments=tasks.environments,
            tasks=tasks,
        )


def _start_text(parts: Parts, stack: contextlib.AsyncExitStack) -> tuple[Engine, protocols.Renderer]:
    """Start an engine that needs no weights; it ends with the stack."""
    (section,) = parts.engines.values()
    setup = parts.engine_setup(section, "", logs=None, colocated=False)
    renderer = TextRenderer()
    hosted: Any = parts.plugins.make("engine", section.name, setup, **section.options)
    engine = PlayingText(hosted, renderer)
    stack.push_async_callback(engine.aclose)
    return engine, renderer


async def _start_engine(
    parts: Parts,
    target: EvalTarget,
    path: Path,
    stack: contextlib.AsyncExitStack,
    status: Callable[[str], None],
) -> tuple[Engine, protocols.Renderer]:
    """Start an engine with the weights of the target; it ends with the stack."""
    from grpo_core.training.building import saved_tensors
    from grpo_core.weights.shm import SharedMemoryWriter

    config, engines = parts.config, parts.engines
    ((key, section),) = engines.items()
    for odd in await asyncio.to_thread(parts.odd_files, path):
        status(f"warning: {odd}")
    devices = await asyncio.to_thread(parts.placement.devices, None, engines)
    setup = parts.engine_setup(section, str(path), logs=None, colocated=False)
    engine = parts.engine(section, setup, devices.engines.get(key, ()))
    if hasattr(engine, "started"):
        await engine.started()
    status("loading the model")
    renderer = await asyncio.to_thread(parts.renderer, str(path), [section])
    writer = SharedMemoryWriter()
    stack.callback(lambda: writer)  # keeps the written weights, also for an engine that restarts
    tensors, base, dtype = await asyncio.to_thread(saved_tensors, path, target.adapters, config)
    weights = evolve(writer.write(target.version, tensors, dtype=dtype), base=base)
    if target.adapters is not None and (record := Published.read(target.adapters)) is not None:
        record.check((info.name, info.dtype, info.checksum) for info in weights.tensors)
    await engine.update_weights(weights)
    return engine, renderer


async def _start_model(
    parts: Parts, tasks: Tasks, stack: contextlib.AsyncExitStack, status: Callable[[str], None]
) -> StartModel:
    """Return the initial model, which is made if necessary; a made one is removed with the stack."""
    from grpo_core.processes import cpu

    config, scratch = parts.config, stack.enter_context(scratch_directory())

    def show(message: str, part: float | None = None) -> None:
        status(message)

    request = ModelRequest(
        directory=Path(scratch) / "model",
        prompts=partial(tasks.prompts, "train"),
        environments=tasks.environments,
        seed=config.seed,
        status=show,
    )
    start = await parts.model.start_model(request)
    if (make := start.prepare) is not None:
        status(start.doing)
        threads = thread_count(config.trainer.threads, config.pipeline.max_staleness > 0)  # like the trainer

        def prepare() -> None:
            cpu.prepare(threads)
            make()

        await asyncio.to_thread(prepare)
    return start
