"""The tasks of a run: each one's environment in its process, and where its prompts come from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import TypeVar

from attrs import define

from grpo_core import workers
from grpo_core.aio import gather
from grpo_core.config import Config
from grpo_core.data.sources import find_source
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.protocols import EnvironmentClient
from grpo_core.records import Prompt

T = TypeVar("T")


@define(eq=False)
class Tasks:
    """The environments of a run, each behind its workers and their batchers."""

    processes: dict[str, EnvironmentPool]
    environments: dict[str, EnvironmentClient]

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, config: Config, block: Sequence[str], logs: Path | None) -> AsyncIterator[Tasks]:
        """Starts all of them at once, and ends them with the block."""
        with workers.cluster(config):
            processes = {
                name: workers.make_environment(
                    name, task, config, block, logs / f"environment-{name}.log" if logs else None
                )
                for name, task in config.tasks.items()
            }
            try:
                await gather(process.start() for process in processes.values())
                yield cls(processes, dict(processes))
            finally:
                await asyncio.gather(*(process.aclose() for process in processes.values()))

    async def prompts(self, config: Config, split: str) -> dict[str, Sequence[Prompt]]:
        """By task, of its source or else of its environment.  Raises PluginError, ConfigError."""

        async def of(name: str, process: EnvironmentPool) -> Sequence[Prompt]:
            source = find_source(name, config.tasks[name].source, split)
            if source is None:
                return await process.prompts(split)
            await asyncio.to_thread(source.open)
            return source

        found = await gather(of(name, process) for name, process in self.processes.items())
        return dict(zip(self.processes, found, strict=True))
