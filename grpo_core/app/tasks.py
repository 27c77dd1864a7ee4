"""The tasks of a run, with their environments and prompts."""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from grpo_core.app import workers
from grpo_core.app.placement import Placement
from grpo_core.config import Config, EnvironmentConfig, SourceConfig, TaskConfig, ValidationConfig
from grpo_core.contracts.errors import ConfigError, PluginError, SelectionError
from grpo_core.contracts.playing import Player, PlayerSetup
from grpo_core.contracts.records import Prompt
from grpo_core.data.dataloaders import Dataloader
from grpo_core.data.sources import find_source
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.environments.sourced import adopted
from grpo_core.plugins.host import PluginHost
from grpo_core.processes.aio import gather
from grpo_core.validation.sets import HeldOut

FIRST = 64
"""Number of prompts that commands without training read from a dataloader."""


@frozen(kw_only=True, eq=False)
class Tasks:
    """The environments of a run, each with its workers and their batchers."""

    environments: Mapping[str, EnvironmentPool]
    of_sets: Mapping[str, EnvironmentPool]
    """The environments of validation sets that have their own, by set."""
    sources: Mapping[str, SourceConfig]
    dataloaders: Mapping[str, Dataloader]
    """The plugins' dataloaders by task; each starts when it is first needed."""
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
        ranks: int = 0,
    ) -> AsyncIterator[Tasks]:
        """Connect the placement, start all environments together, and end both with the block.

        Args:
            sets: names of validation sets whose own environments start as well.
            logs: directory of the log files.
            ranks: number of further workers that the placement needs.
        """
        tasks, of_sets = config.tasks, config.validation.environments(sets)
        every = {**tasks, **of_sets}
        wanted = config.engine.workers + config.environment.workers * len(every) + ranks
        with placement.connected(wanted):
            environments = {
                name: workers.make_environment(
                    name,
                    task,
                    config.environment,
                    placement,
                    log=logs / f"environment-{name}.log" if logs else None,
                )
                for name, task in every.items()
            }
            for task in tasks.values():
                if task.dataloader:
                    host.find("dataloader", task.dataloader).load()  # two threads must not import a plugin
            dataloaders = {
                name: Dataloader(
                    name,
                    task.dataloader,
                    partial(host.make, "dataloader", task.dataloader, **task.dataloader_options),
                    task.source,
                    seed=config.seed,
                    deadline=config.environment.start_deadline,
                    adopt=environments[name].from_source,
                )
                for name, task in tasks.items()
                if task.dataloader
            }
            try:
                await gather(environment.start() for environment in environments.values())
                async with _playing(every, environments, config.environment, placement, host):
                    yield cls(
                        environments={name: environments[name] for name in tasks},
                        of_sets={name: environments[name] for name in of_sets},
                        sources={name: task.source for name, task in every.items()},
                        dataloaders=dataloaders,
                        seed=config.seed,
                    )
            finally:
                for dataloader in dataloaders.values():
                    dataloader.close()
                await asyncio.gather(*(environment.aclose() for environment in environments.values()))

    async def prompts(self, split: str, first: int = FIRST) -> dict[str, Sequence[Prompt]]:
        """Return each task's prompts, from its source or environment.  Raises PluginError, ConfigError.

        Args:
            first: number of next prompts to read from a dataloader.
        """
        found = await gather(self._prompts(*named, split, first) for named in self.environments.items())
        return dict(zip(self.environments, found, strict=True))

    async def prompts_of(self, task: str, split: str) -> Sequence[Prompt]:
        """Return the prompts of one task, or some from its dataloader.  Raises PluginError, ConfigError."""
        return await self._prompts(task, self.environments[task], split, FIRST)

    def size(self, task: str, prompts: Sequence[Prompt]) -> int:
        """Return the number of training prompts of a task, if known."""
        dataloader = self.dataloaders.get(task)
        return len(prompts) if dataloader is None else dataloader.size or 0

    async def held_out(
        self, validation: ValidationConfig, names: Collection[str], *, tasks: bool
    ) -> list[HeldOut]:
        """Return the prompts of all tasks, if wanted, and of the named sets."""
        plain = HeldOut(
            config=validation,
            prompts=await self.prompts("validation", validation.prompts) if tasks else {},
            environments=self.environments,
            seed=self.seed,
        )

        async def of_set(name: str) -> HeldOut:
            """Return the prompts of a set; prompts of a task get the set's name."""
            task, config = validation.sets[name].task, validation.of_set(name)
            environment = self.environments[task] if task else self.of_sets[name]
            found = await self._prompts(task or name, environment, "validation", config.prompts)
            if not found:
                raise ConfigError(f"validation.sets.{name}: there are no prompts for validation")
            part = HeldOut(
                name=name,
                config=config,
                prompts={name: found},
                environments={name: environment},
                of={name: len(found)},
                seed=self.seed,
            )
            prompts = [evolve(prompt, environment=name) for prompt in part.measured()[name]]
            return evolve(part, prompts={name: prompts})

        return [*([plain] if tasks else []), *await gather(map(of_set, names))]

    async def _prompts(
        self, name: str, environment: EnvironmentPool, split: str, first: int
    ) -> Sequence[Prompt]:
        if name in self.dataloaders:
            return await self._of_dataloader(name, environment, split, first)
        source = find_source(name, self.sources[name], split)
        if source is None and name in self.of_sets:  # all rows of a set's source are held out
            source = find_source(name, self.sources[name], "train")
        if source is None:
            return await self._offered(name, environment, split)
        await asyncio.to_thread(source.open)
        return await adopted(source, environment)

    async def _of_dataloader(
        self, name: str, environment: EnvironmentPool, split: str, first: int
    ) -> Sequence[Prompt]:
        """Return the first prompts of a dataloader; held-out ones of the environment if it has none."""
        dataloader = self.dataloaders[name]
        if split == "train":
            return await dataloader.first(first)
        found = await dataloader.held_out(first)
        if found is None:
            return await self._offered(name, environment, split)
        made = await environment.from_source(found)
        return found if made is None else made

    async def _offered(self, name: str, environment: EnvironmentPool, split: str) -> Sequence[Prompt]:
        """Return an environment's prompts.  Raises PluginError, ConfigError."""
        try:
            prompts = await environment.prompts(split)
        except PluginError as error:
            if split == "validation" and name in self.dataloaders:
                raise ConfigError(
                    f"task {name!r}: it has no held-out prompts: its dataloader returns None for "
                    "'validation', and its environment offers none. Return some, or set validation.every=0. "
                    f"({error})"
                ) from error
            if split == "train" or not self.sources[name].path:
                raise
            raise ConfigError(
                f"task {name!r}: it has no held-out prompts: source.path has training prompts only, and its "
                f"environment offers none. Set tasks.{name}.source.validation_path (or validation_split, for "
                f"a data set), or validation.every=0. ({error})"
            ) from error
        if split == "train" and not prompts:
            raise PluginError(
                f"task {name!r}: prompts('train') of its environment is empty; expected at least one prompt"
            )
        return prompts


@contextlib.asynccontextmanager
async def _playing(
    tasks: Mapping[str, TaskConfig],
    environments: Mapping[str, EnvironmentPool],
    config: EnvironmentConfig,
    placement: Placement,
    host: PluginHost,
) -> AsyncIterator[None]:
    """Give the started environments the players of their tasks."""
    shared: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, task in tasks.items():
        player = task.player or ("agents" if environments[name].runs_agents else "turns")
        shared[player, repr(task.player_options)].append(name)
    async with contextlib.AsyncExitStack() as stack:
        for (player, _), names in shared.items():
            runs = {name: environments[name].runs_agents for name in names}
            setup = PlayerSetup(tasks=runs, host=config.agent_host, remote=placement.remote)
            made = make_player(host, player, setup, tasks[names[0]].player_options)
            if made is not None:
                stack.push_async_callback(made.aclose)
                await made.start()
            for name in names:
                environments[name].player = made
        yield


def make_player(host: PluginHost, name: str, setup: PlayerSetup, options: Mapping[str, Any]) -> Player | None:
    """Make a player; None plays turn by turn.

    Raises PluginError or ConfigError if the player does not exist or does not fit the environments.
    """
    runs = [task for task, defined in setup.tasks.items() if defined]
    try:
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
