"""An environment with the data of a task, for commands and tests that start no run."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any, cast

from attrs import field, frozen

from grpo_core.app.data import Converting, TaskData, check_data
from grpo_core.config import EnvironmentConfig, TaskConfig, build, structured
from grpo_core.contracts.errors import PluginError
from grpo_core.contracts.records import Prompt
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.installed import ALL_PLUGINS, PluginSelection

DATA = ("data", "data_options", "validation_data")
"""Keys of a task that may be among the options of an environment."""
FIRST = 64
"""Number of prompts of rows that are read ahead."""


@frozen(kw_only=True)
class Sections:
    """Sections of a run's configuration within an environment's options."""

    environment: EnvironmentConfig = field(factory=EnvironmentConfig)
    task: TaskConfig = field(factory=lambda: TaskConfig(env=""))
    """Where the prompts come from."""


def pop_sections(options: dict[str, Any]) -> Sections:
    """Remove the sections from an environment's options and return them.

    Raises ConfigError for an unknown key or a bad value.
    """
    environment = build([{"environment": options.pop("environment", {})}]).environment
    given = {key: options.pop(key) for key in DATA if key in options}
    return Sections(environment=environment, task=structured(TaskConfig, {"env": "", **given}))


class SourcedProcess(EnvironmentProcess):
    """An ``EnvironmentProcess`` with the prompts of a task's data.

    Args:
        spec, plugins: as for ``EnvironmentProcess``.
        data: section of the task, with the data.
    """

    def __init__(
        self, spec: EnvironmentSpec, *, plugins: PluginSelection = ALL_PLUGINS, data: TaskConfig
    ) -> None:
        super().__init__(spec, plugins=plugins)
        self._has_data = bool(data.data or data.validation_data)
        host = PluginHost.of(plugins)
        if self._has_data:
            check_data("data", spec.task, data, host)
        own = SimpleNamespace(prompts=super().prompts, convert=self.convert)
        self._data = TaskData.of(spec.task, data, host, cast(Converting, own))

    async def prompts(self, split: str) -> list[Prompt]:
        """Return the prompts of a split.  Raises PluginError, ConfigError."""
        if not self._has_data:
            return await super().prompts(split)
        if split == "train":
            return list(await self._data.prompts(split, FIRST))
        if (found := await self._data.held_out_rows(FIRST)) is not None:
            return list(found)
        with contextlib.suppress(PluginError):  # it has no prompts itself
            return await super().prompts(split)
        return []

    async def aclose(self) -> None:
        self._data.close()
        await super().aclose()
