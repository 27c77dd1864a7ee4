"""The tasks of a run, with their environments and prompts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from attrs import evolve, frozen

from grpo_core.app import making
from grpo_core.app.data import TaskData
from grpo_core.app.make import of_task
from grpo_core.app.placement import Placement
from grpo_core.config import Config, EnvironmentConfig, TaskConfig, ValidationConfig
from grpo_core.contracts.errors import ConfigError, PluginError, SelectionError, plugin_errors
from grpo_core.contracts.playing import Player, PlayerSetup
from grpo_core.contracts.records import Prompt
from grpo_core.data.loaders import LookAhead
from grpo_core.data.rows import known_of
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.environments.process import EnvironmentSpec
from grpo_core.plugins.host import PluginHost
from grpo_core.processes.aio import gather
from grpo_core.validation.runner import HeldOut

FIRST = 64
"""Number of prompts that commands without training read from a dataloader."""

AGENT_PROCESSES = 8
"""Largest number of processes of an agent, unless ``environment.workers`` is set."""


@frozen(kw_only=True, eq=False)
class Tasks:
    """The environments of a run, each with its workers."""

    environments: Mapping[str, EnvironmentPool]
    of_sets: Mapping[str, EnvironmentPool]
    """The environments of validation sets that have their own, by set."""
    data: Mapping[str, TaskData]
    """The data of tasks, and of sets with their own environment."""
    seed: int

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls,
        config: Config,
        host: PluginHost,
        placement: Placement,
        *,
        sets: Collection[str] = (),
        logs: Path | None = None,
        tries: bool = False,
        workers: int = 0,
    ) -> AsyncIterator[Tasks]:
        """Connect the placement, start all environments together, and end both with the block.

        Args:
            config: has the tasks.
            host: its plugins.
            placement: of the environments.
            sets: names of validation sets whose own environments start as well.
            logs: directory of the log files.
            tries: whether streams are tried before they are used.
            workers: number of the placement's workers in which a trainer runs.
        """
        tasks, of_sets = config.tasks, config.validation.environments(sets)
        every = {**tasks, **of_sets}
        workers += config.engine.workers + (config.environment.workers or 1) * len(every)
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(placement.connected(workers))
            compared = making.of_reward(config, host)
            files = {name: logs / f"environment-{name}.log" if logs else None for name in every}
            environments = {
                name: make_environment(
                    name, task, config.environment, host, placement, log=files[name], parts=compared
                )
                for name, task in every.items()
            }
            stack.push_async_callback(
                lambda: asyncio.gather(*(each.aclose() for each in environments.values()))
            )
            data = {
                name: TaskData.of(
                    name,
                    task,
                    host,
                    environments[name],
                    seed=config.seed,
                    deadline=config.environment.start_deadline,
                    tries=tries,
                    needs=config.trainer.steps * config.trainer.prompts_per_step if len(tasks) == 1 else 0,
                )
                for name, task in every.items()
            }
            for each in data.values():
                stack.callback(each.close)
            await gather(environment.start() for environment in environments.values())
            shared: dict[tuple[str | None, str], list[str]] = defaultdict(list)
            for name, task in every.items():
                player = task.player or (None if environments[name].about.runs_agents else "turns")
                shared[player, repr(task.player_options)].append(name)
            for (player, _), names in shared.items():
                runs = {name: environments[name].about.runs_agents for name in names}
                setup = PlayerSetup(tasks=runs, host=config.environment.agent_host, remote=placement.remote)
                made = make_player(host, player, setup, every[names[0]].player_options)
                if made is not None:
                    stack.push_async_callback(made.aclose)
                    with plugin_errors(f"player {type(made).__name__}: start()"):
                        await made.start()
                for name in names:
                    environments[name].player = made
            yield cls(
                environments={name: environments[name] for name in tasks},
                of_sets={name: environments[name] for name in of_sets},
                data=data,
                seed=config.seed,
            )
            for environment in environments.values():
                environment.check_combine()

    @property
    def loaders(self) -> dict[str, LookAhead]:
        """The loaders of rows that are read ahead, by task; ``prompts("train")`` makes them."""
        loaders = {name: self.data[name].loader for name in self.environments}
        return {name: loader for name, loader in loaders.items() if loader is not None}

    async def prompts(
        self, split: str, first: int = FIRST, tasks: Collection[str] | None = None
    ) -> dict[str, Sequence[Prompt]]:
        """Return the prompts of these tasks, by default all, or the first of them.

        Raises PluginError, ConfigError.

        Args:
            first: number of next prompts to read where they are read ahead.
        """
        names = self.environments if tasks is None else tasks
        found = await gather(self.data[name].prompts(split, first) for name in names)
        return dict(zip(names, found, strict=True))

    def size(self, task: str, prompts: Sequence[Prompt]) -> int:
        """Return the number of training prompts of a task, if known."""
        loader = self.data[task].loader
        return len(prompts) if loader is None else loader.size or 0

    async def held_out(
        self, validation: ValidationConfig, sets: Collection[str], tasks: Collection[str]
    ) -> list[HeldOut]:
        """Return the held-out prompts of these tasks, if there are any, and of these sets."""

        def part(
            name: str,
            config: ValidationConfig,
            prompts: Mapping[str, Sequence[Prompt]],
            environments: Mapping[str, EnvironmentPool],
        ) -> HeldOut:
            known = {task: known_of(found) for task, found in prompts.items()}
            return HeldOut(
                name=name, config=config, prompts=prompts, environments=environments, of=known, seed=self.seed
            )

        async def of_set(name: str) -> HeldOut:
            """Return the prompts of a set; prompts of a task get the set's name."""
            task, config = validation.sets[name].task, validation.of_set(name)
            environment = self.environments[task] if task else self.of_sets[name]
            found = await self.data[task or name].prompts("validation", config.prompts)
            if not found:
                raise ConfigError(f"validation.sets.{name}: there are no prompts for validation")
            own = part(name, config, {name: found}, {name: environment})
            prompts = [evolve(prompt, environment=name) for prompt in own.selection()[name]]
            return evolve(own, prompts={name: prompts})

        plain = part(
            "", validation, await self.prompts("validation", validation.prompts, tasks), self.environments
        )
        return [*([plain] if tasks else []), *await gather(map(of_set, sets))]


def make_environment(
    name: str,
    task: TaskConfig,
    chosen: EnvironmentConfig,
    host: PluginHost,
    placement: Placement,
    *,
    log: Path | None = None,
    parts: Mapping[str, str] = MappingProxyType({}),
) -> EnvironmentPool:
    """Make the workers of a task's environment, not yet started; ``parts``: as ``of_reward`` returns them."""
    own = of_task(chosen, task)
    here = not placement.pooled  # on a cluster, the workers that it has room for are known at the start
    count = chosen.workers or (AGENT_PROCESSES if here and not host.of_program(task.env) else 1)
    logs = [log.with_stem(f"{log.stem}-{i}") if i and log else log for i in range(count)]
    spec = EnvironmentSpec(task=name, env=task.env, options=task.options, config=own)
    return EnvironmentPool(
        [placement.environment(i, evolve(spec, log=logs[i])) for i in range(count)],
        own,
        for_agents=chosen.workers is None,
        on_demand=here,
        name=name,
        success=task.success,
        parts=parts,
    )


def make_player(
    host: PluginHost, name: str | None, setup: PlayerSetup, options: Mapping[str, Any]
) -> Player | None:
    """Make a player; None plays turn by turn, and the name None is the one that plays agents.

    Raises PluginError or ConfigError if the player does not exist or does not fit the environments.
    """
    runs = [task for task, defined in setup.tasks.items() if defined]
    try:
        name = name or host.the_one("player", "plays_agents")
        player = host.make("player", name, setup, **options)
    except SelectionError as error:
        who = f"task {runs[0]!r}: its environment defines run; " if runs else ""
        raise SelectionError(f"{who}{error}") from error
    if player is None and runs:
        raise ConfigError(
            f"task {runs[0]!r}: its environment defines run, which the player {name!r} does not call; leave "
            f"out tasks.{runs[0]}.player"
        )
    if player is not None and not isinstance(player, Player):
        raise PluginError(
            f"player {name!r} is {type(player).__name__}, expected a subclass of grpo_core.Player"
        )
    return player
