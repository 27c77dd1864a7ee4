"""A session: a model and the environments of its tasks, which play without training."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence

from attrs import evolve, frozen

from grpo_core.aio import gather
from grpo_core.app.parts import make_placement, sampling_params
from grpo_core.app.run import lines_of_incidents, start_engine, started_tasks
from grpo_core.app.tasks import Tasks
from grpo_core.config import Config
from grpo_core.errors import ConfigError
from grpo_core.incidents import reported_to
from grpo_core.loop.rollout import RolloutRequest, derive_seed, play
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import Engine, EnvironmentClient, Renderer
from grpo_core.records import Prompt, Rollout
from grpo_core.validation.target import EvalTarget


@frozen(kw_only=True)
class Session:
    """A model and the environments of its tasks.  ``grpo_core.session`` starts and ends it."""

    config: Config
    """Configuration of the session."""
    engine: Engine
    """Engine that holds the model's weights."""
    renderer: Renderer
    """Turns messages into tokens, by the model's chat template."""
    environments: Mapping[str, EnvironmentClient]
    """Environments by task."""
    _tasks: Tasks

    async def prompts(self, task: str | None = None, *, split: str = "train") -> Sequence[Prompt]:
        """Return the prompts of a task, by default of the only one.  Raises ConfigError, EnvironmentError."""
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
            temperature: None is that of training.
            environments: others that judge the rollouts, by task.

        A rollout that could not be finished has no reward, and says why in ``error``.  Raises EngineError.
        """
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
            return await play(
                requests,
                engine=self.engine,
                environments=environments or self.environments,
                renderer=self.renderer,
                sampling=sampling,
                deadline=self.config.rollout.deadline,
            )

        return list(await gather(group(prompt) for prompt in prompts))


@contextlib.asynccontextmanager
async def start_session(
    config: Config, host: PluginHost, target: EvalTarget, status: Callable[[str], None]
) -> AsyncIterator[Session]:
    """Start the environments of all tasks, and an engine with the target's weights.

    Args:
        status: is called with messages to the user.

    Raises GrpoError if one of them cannot be started.
    """
    for note in target.notes:
        status(note)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(reported_to(lines_of_incidents(status)))
        placement = make_placement(config.placement, host)
        status("starting the environments")
        tasks = await stack.enter_async_context(started_tasks(config, placement, host, sets=[], logs=None))
        engine, renderer = await start_engine(
            config,
            target.model,
            adapters=target.adapters,
            version=target.version,
            host=host,
            tasks=tasks,
            placement=placement,
            stack=stack,
            status=status,
        )
        yield Session(
            config=config, engine=engine, renderer=renderer, environments=tasks.environments, tasks=tasks
        )
