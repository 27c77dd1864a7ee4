"""Environments whose prompts come from a file or data set, for commands and tests that start no run."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from attrs import field, frozen

from grpo_core.config import EnvironmentConfig, SourceConfig, build, structured
from grpo_core.contracts.errors import PluginError
from grpo_core.contracts.records import Prompt
from grpo_core.data.sources import Source, find_source
from grpo_core.environments.process import EnvironmentProcess

ROWS_OF_A_CALL = 1000
"""Rows of a source that an environment converts to prompts in one call."""


class Adopting(Protocol):
    """An environment that may convert the prompts of a source."""

    async def from_source(self, prompts: Sequence[Prompt]) -> list[Prompt] | None: ...


def has_source(options: Mapping[str, Any]) -> bool:
    """Return whether an environment's options include a task's table ``source``."""
    return isinstance(options.get("source"), Mapping)


@frozen(kw_only=True)
class Sections:
    """Sections of a run's configuration within an environment's options."""

    environment: EnvironmentConfig = field(factory=EnvironmentConfig)
    source: SourceConfig = field(factory=SourceConfig)
    """Where the prompts come from, as ``source`` of a task."""


def taken_sections(options: dict[str, Any]) -> Sections:
    """Remove the sections from an environment's options and return them.

    Raises ConfigError for an unknown key or a bad value.
    """
    environment = build([{"environment": options.pop("environment", {})}]).environment
    given = options.pop("source") if has_source(options) else {}
    return Sections(environment=environment, source=structured(SourceConfig, given, where="source"))


async def adopted(source: Source, environment: Adopting) -> Sequence[Prompt]:
    """Return the source's prompts as the environment converts them, or the source unchanged."""
    made: list[Prompt] = []
    for begin in range(0, len(source), ROWS_OF_A_CALL):
        rows = await asyncio.to_thread(source.__getitem__, slice(begin, begin + ROWS_OF_A_CALL))
        some = await environment.from_source(rows)
        if some is None:
            return source
        made += some
    return made


class SourcedProcess(EnvironmentProcess):
    """An ``EnvironmentProcess`` with the prompts of a source, as for a task of a run.

    Args:
        given: arguments of ``EnvironmentProcess``, as ``named``.
        source: source of the prompts; without a path, the environment.
    """

    def __init__(self, *given: Any, source: SourceConfig, **named: Any) -> None:
        super().__init__(*given, **named)
        found = {split: find_source(self.task, source, split) for split in ("train", "validation")}
        self._sources = {split: source for split, source in found.items() if source is not None}

    async def start(self) -> None:
        """Make the environment.  Raises ConfigError if a source cannot be read, PluginError."""
        for source in self._sources.values():
            await asyncio.to_thread(source.open)
        await super().start()

    async def prompts(self, split: str) -> list[Prompt]:
        """Return the prompts of a split.  Raises PluginError."""
        if split in self._sources:
            return list(await adopted(self._sources[split], self))
        try:
            return await super().prompts(split)
        except PluginError:
            if split == "train" or not self._sources:
                raise
            return []  # it has no prompts itself
