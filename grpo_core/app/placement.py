"""Placements of engines and environments, and the default: child processes of this machine."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Protocol

from grpo_core.app import gpus
from grpo_core.app.gpus import Devices
from grpo_core.config import EngineConfig, TrainerConfig
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.protocols import Engine
from grpo_core.contracts.records import EngineSetup, Weights
from grpo_core.environments.pool import EnvironmentSpec, EnvironmentWorker
from grpo_core.environments.process import EnvironmentProcess
from grpo_core.plugins.host import PluginHost
from grpo_core.storage.copies import Copies, WeightsLease

Retain = Callable[[Weights], Awaitable[WeightsLease]]
"""Takes a lease of published weights that outlives the trainer's next publication."""


class Placement(Protocol):
    """A place where engines and environments run; the core decides their number and their work."""

    pooled: bool
    """Whether engines can be lost with their machine, so that even a single engine needs a pool."""
    remote: bool
    """Whether workers may run on other machines than the trainer."""

    def check(
        self, trainer: TrainerConfig | None, engines: Mapping[str, EngineConfig], ranks: int = 1
    ) -> None:
        """Raise ConfigError if a key of these sections has no effect here, or names a missing part.

        Args:
            trainer: None if nothing is trained.
            engines: sections by key, as in "validation.engine".
            ranks: number of the trainer's processes.
        """

    def connected(self, workers: int) -> contextlib.AbstractContextManager[None]:
        """Connect for a run with this many workers.  Raises ConfigError if that is impossible."""

    def devices(
        self, trainer: TrainerConfig | None, engines: Mapping[str, EngineConfig], ranks: int = 1
    ) -> Devices:
        """Choose GPUs, and reserve the trainer's if others could use it; called once, when connected.

        Arguments and errors are as for ``check``.
        """

    def engine(self, number: int, config: EngineConfig, setup: EngineSetup) -> Engine:
        """Start the engine with this number, without waiting for it."""

    def retain(self) -> Retain:
        """Make the function that retains weights for one pool of these engines."""

    def environment(self, number: int, spec: EnvironmentSpec) -> EnvironmentWorker:
        """Make the environment worker with this number, not yet started."""


class LocalPlacement:
    """A ``Placement`` in child processes of this machine.

    Args:
        plugins: makes the engines; environments load the same plugins in their own processes.
    """

    pooled = False
    remote = False

    def __init__(self, plugins: PluginHost) -> None:
        self._plugins = plugins

    def check(
        self, trainer: TrainerConfig | None, engines: Mapping[str, EngineConfig], ranks: int = 1
    ) -> None:
        for section, engine in engines.items():
            if engine.gpus_per_worker:
                raise ConfigError(
                    f"{section}.gpus_per_worker is for workers in a cluster; add --ray, or name the GPUs in "
                    f"{section}.gpus"
                )
            if engine.env_vars:
                raise ConfigError(
                    f"{section}.env_vars is for workers in a cluster; add --ray, or leave it out"
                )
        self.devices(trainer, engines, ranks)

    def connected(self, workers: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def devices(
        self, trainer: TrainerConfig | None, engines: Mapping[str, EngineConfig], ranks: int = 1
    ) -> Devices:
        joined = gpus.joined_to_trainer(engines, self._plugins)
        return gpus.choose(trainer, engines, gpus.visible(), joined, ranks)

    def engine(self, number: int, config: EngineConfig, setup: EngineSetup) -> Engine:
        if setup.log_directory:
            Path(setup.log_directory).mkdir(parents=True, exist_ok=True)
        engine: Engine = self._plugins.make("engine", config.name, setup, **config.options)
        return engine

    def retain(self) -> Retain:
        return Copies().hold

    def environment(self, number: int, spec: EnvironmentSpec) -> EnvironmentWorker:
        return EnvironmentProcess(
            spec.task,
            spec.env,
            spec.options,
            config=spec.config,
            plugins=self._plugins.selection,
            log=spec.log,
            host=self._plugins if self._plugins.of_program(spec.env) else None,
        )
