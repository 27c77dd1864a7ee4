"""The tasks of a run: each one's environment in its process, and where its prompts come from."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from attrs import define

from grpo_core.batcher import BatchedJudge
from grpo_core.config import Config
from grpo_core.environments import EnvironmentProcess
from grpo_core.pipeline import root_cause
from grpo_core.protocols import Judge
from grpo_core.records import Prompt
from grpo_core.sources import find_source

T = TypeVar("T")

DEMONSTRATIONS = 5000
"""Prompts at most whose solutions a tiny model is warmed up with."""


@define(eq=False)
class Tasks:
    """The environments of a run, each behind its process and its batcher."""

    processes: dict[str, EnvironmentProcess]
    judges: dict[str, Judge]

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, config: Config, block: Sequence[str], logs: Path | None) -> AsyncIterator[Tasks]:
        """Starts all of them at once, and ends them with the block."""
        processes = {
            name: EnvironmentProcess(
                name,
                task.env,
                task.options,
                config=config.environment,
                allow=config.plugins,
                block=block,
                log=logs / f"environment-{name}.log" if logs else None,
            )
            for name, task in config.tasks.items()
        }
        judges: dict[str, BatchedJudge] = {}
        try:
            await all_at_once(process.start() for process in processes.values())
            judges = {name: BatchedJudge(process, config.environment) for name, process in processes.items()}
            yield cls(processes, dict(judges))
        finally:
            for judge in judges.values():
                await judge.aclose()
            await asyncio.gather(*(process.aclose() for process in processes.values()))

    async def prompts(self, config: Config, split: str) -> dict[str, Sequence[Prompt]]:
        """By task, of its source or else of its environment.  Raises PluginError, ConfigError."""

        async def of(name: str, process: EnvironmentProcess) -> Sequence[Prompt]:
            source = find_source(name, config.tasks[name].source, split)
            if source is None:
                return await process.prompts(split)
            await asyncio.to_thread(source.open)
            return source

        found = await all_at_once(of(name, process) for name, process in self.processes.items())
        return dict(zip(self.processes, found, strict=True))


async def demonstrations(
    tasks: Tasks, prompts: Mapping[str, Sequence[Prompt]]
) -> tuple[tuple[str, str], ...]:
    """What a tiny model is warmed up with: prompts and their solutions, of all tasks."""
    each = max(1, DEMONSTRATIONS // len(prompts))
    pairs: list[tuple[str, str]] = []
    for task, part in prompts.items():
        some = part[:each]
        for prompt, reply in zip(some, await tasks.processes[task].solve(some), strict=True):
            if reply is not None:
                text = "".join(str(message.get("content") or "") for message in prompt.messages)
                pairs.append((text, reply))
    return tuple(pairs)


async def all_at_once(awaitables: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Await all at once; the first that fails cancels the others and is raised as it is."""
    try:
        async with asyncio.TaskGroup() as group:
            started = [group.create_task(awaitable) for awaitable in awaitables]
    except BaseExceptionGroup as failed:
        cause = root_cause(failed)
        raise cause from cause.__cause__
    return [task.result() for task in started]
