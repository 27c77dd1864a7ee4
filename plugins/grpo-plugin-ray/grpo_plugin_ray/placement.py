"""The placement ``ray``: each engine and each environment in a Ray actor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from types import MappingProxyType

from grpo_core import ConfigError, Engine, EngineSetup
from grpo_core.engine_kit import EngineConfig, EnvironmentSpec, EnvironmentWorker, PluginHost, Retain
from grpo_plugin_ray.cluster import PluginRequirement, connected
from grpo_plugin_ray.engines import RayEngine, Store, WorkerSetup
from grpo_plugin_ray.environments import EnvironmentSetup, RayEnvironment

STRATEGIES = {"pack": "DEFAULT", "spread": "SPREAD"}
"""Ray's names of ``engine.placement``."""


class RayPlacement:
    """A ``Placement`` of engines and environments in Ray workers.

    Args:
        address: of a running cluster ("auto", "host:6379"); empty: one of this machine alone, for the run.
    """

    requires = MappingProxyType({"ray": "pip install 'grpo-core[ray]'"})
    """Packages that have to be installed, each with the command for it."""

    pooled = True

    def __init__(self, plugins: PluginHost, *, address: str = "") -> None:
        self.remote = bool(address)
        self._plugins, self._address = plugins, address
        self._store = Store()

    def check(self, engine: EngineConfig) -> None:
        """Raise ConfigError if ``env_vars`` names a variable that is not set."""
        from_here(engine.env_vars)

    def connected(self, workers: int) -> contextlib.AbstractContextManager[None]:
        return connected(self._address, cpus=max(workers, os.cpu_count() or 1))

    def engine(self, number: int, config: EngineConfig, setup: EngineSetup) -> Engine:
        return RayEngine(
            f"engine {number}",
            WorkerSetup(
                origin=PluginRequirement.of(self._plugins.find("engine", config.name)),
                setup=setup,
                options=config.options,
                env_vars=from_here(config.env_vars),
            ),
            store=self._store,
            resources={
                "num_cpus": 1,
                "num_gpus": config.gpus_per_worker,
                "scheduling_strategy": STRATEGIES[config.placement],
            },
        )

    def retain(self) -> Retain:
        return self._store.hold

    def environment(self, number: int, spec: EnvironmentSpec) -> EnvironmentWorker:
        return RayEnvironment(
            f"environment {spec.task} {number}",
            EnvironmentSetup(
                task=spec.task,
                origin=PluginRequirement.of(self._plugins.find("environment", spec.env)),
                options=spec.options,
                config=spec.config,
                log=str(spec.log.resolve()) if spec.log else None,
            ),
            resources={"num_cpus": 1, "scheduling_strategy": STRATEGIES["spread"]},
        )


def from_here(env_vars: Mapping[str, str]) -> dict[str, str]:
    """Replace values like ``"$HF_TOKEN"`` by this process's variables, which no file of the run holds."""
    names = {name: value.strip("${}") for name, value in env_vars.items() if value.startswith("$")}
    if missing := sorted(name for name in names.values() if name not in os.environ):
        raise ConfigError(f"engine.env_vars: the environment variable {missing[0]} is not set")
    return {**env_vars, **{name: os.environ[other] for name, other in names.items()}}
