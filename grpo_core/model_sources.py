"""Which model a run starts from: one that a plugin makes, a directory, or a hub id."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from grpo_core.config import ModelConfig
from grpo_core.errors import ConfigError
from grpo_core.models import check_path, local_directory
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import EnvironmentClient
from grpo_core.records import Prompt


class SolvingEnvironment(EnvironmentClient, Protocol):
    """An environment that may know replies worth full marks."""

    async def solve(self, prompts: Sequence[Prompt]) -> list[str | None]: ...


@frozen(kw_only=True)
class StartModel:
    """The model that a run starts from."""

    path: str
    """Its directory."""
    prepare: Callable[[], None] | None = None
    """Makes the directory unless it is there; called once, in a process that has torch.  Plain data, so that
    it can be sent there.  None: the directory is there already."""
    doing: str = "loading the model"
    """What the user reads meanwhile."""


@frozen(kw_only=True, eq=False)
class ModelRequest:
    """What a source may use to make a model."""

    directory: Path
    """Where the model may be made; nothing is there, or what an earlier start of the run has made."""
    prompts: Callable[[], Awaitable[Mapping[str, Sequence[Prompt]]]]
    """The training prompts by task."""
    environments: Mapping[str, SolvingEnvironment]
    seed: int


class ModelSource(Protocol):
    """Says which model a run starts from, and makes it if need be.

    A plugin offers one by the hook ``grpo_models``; ``model.path`` chooses it by its name.
    """

    @property
    def preset(self) -> Mapping[str, Any]:
        """Tables of the configuration that lie beneath the user's."""

    def check(self) -> None:
        """Raises ModelError if the model cannot be there; loads nothing."""

    async def start_model(self, request: ModelRequest) -> StartModel:
        """Raises ModelError if there is no such model."""


class Pretrained:
    """A directory, or a hub id.  Satisfies ``ModelSource``."""

    preset: Mapping[str, Any] = {}

    def __init__(self, path: str) -> None:
        self._path = path

    def check(self) -> None:
        check_path(self._path)

    async def start_model(self, request: ModelRequest) -> StartModel:
        return StartModel(path=await asyncio.to_thread(local_directory, self._path))


def model_source(config: ModelConfig, plugins: PluginHost) -> ModelSource:
    """The source that a plugin offers as ``model.path``; else that path, or hub id.

    Raises ConfigError for options of a path, PluginError for options that the source does not have.
    """
    if plugins.offers("model", config.path):
        source: ModelSource = plugins.make("model", config.path, **config.options)
        return source
    if config.options:
        raise ConfigError(
            f"model.options: model {config.path!r} is a directory or hub id, which has no options"
        )
    return Pretrained(config.path)
