"""The training signal of an environment with a given model: how many groups would teach it something."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_core.aio import gather
from grpo_core.app.launch import check
from grpo_core.app.parts import make_placement, sampling_params
from grpo_core.app.run import lines_of_incidents, start_engine, started_tasks
from grpo_core.audit.records import Finding
from grpo_core.audit.training import PlayingModel, training_signal
from grpo_core.commands.trying import measured_task
from grpo_core.config import Config
from grpo_core.errors import wrong_input
from grpo_core.incidents import reported_to
from grpo_core.loop.rollout import RolloutRequest, derive_seed, play
from grpo_core.plugins.host import PluginHost
from grpo_core.records import Rollout
from grpo_core.validation.target import EvalTarget

Playing = tuple[Config, PluginHost, EvalTarget, str]
"""The configuration with which a model plays, its plugins, the model, and the name of the task."""


def playable(name: str, player: PlayingModel, options: Mapping[str, Any], block: Sequence[str]) -> Playing:
    """Return the configuration with which the model plays, as ``measured_task``.

    Raises GrpoError if there is no such model, environment or engine.
    """
    with wrong_input():
        config, host, measured, task = measured_task(name, player.target, player.engine, dict(options), block)
    check(config, host, trains=False)
    return config, host, measured, task


async def signal(playing: Playing, player: PlayingModel, status: Callable[[str], None]) -> Finding:
    """Let a model play groups as in training, and judge what they would teach.

    Raises GrpoError if the model or the environment cannot be started.
    """
    config, host, measured, task = playing
    for note in measured.notes:
        status(note)
    async with contextlib.AsyncExitStack() as stack:
        stack.enter_context(reported_to(lines_of_incidents(status)))
        placement = make_placement(config.placement, host)
        status("starting the environment and the model")
        tasks = await stack.enter_async_context(started_tasks(config, placement, host, sets=[], logs=None))
        engine, renderer = await start_engine(
            config,
            measured.model,
            adapters=measured.adapters,
            version=measured.version,
            host=host,
            tasks=tasks,
            placement=placement,
            stack=stack,
            status=status,
        )
        given = await tasks.prompts_of(task, "train")
        step = max(1, len(given) // player.prompts)
        prompts = [given[place] for place in range(0, len(given), step)][: player.prompts]
        size = config.rollout.group_size
        status(f"playing {len(prompts)} groups of {size}")

        async def group(prompt: Any) -> list[Rollout]:
            requests = [
                RolloutRequest(
                    prompt=prompt, seed=derive_seed(player.seed, prompt.id, number), group=prompt.id
                )
                for number in range(size)
            ]
            return await play(
                requests,
                engine=engine,
                environments={task: tasks.environments[task]},
                renderer=renderer,
                sampling=sampling_params(config.rollout),
                deadline=config.rollout.deadline,
            )

        groups = await gather(group(prompt) for prompt in prompts)
    return training_signal(
        [[rollout.reward for rollout in group] for group in groups],
        success=tasks.environments[task].success,
        model=measured.name,
    )
