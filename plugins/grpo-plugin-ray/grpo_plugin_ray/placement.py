"""The placement ``ray``: each engine and each environment in a Ray actor."""

from __future__ import annotations

import contextlib
import os
from types import MappingProxyType

from grpo_core import Engine, EngineSetup
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
        """Every key of an engine's section has a meaning here."""

    def connected(self, workers: int) -> contextlib.AbstractContextManager[None]:
        return connected(self._address, cpus=max(workers, os.cpu_count() or 1))

    def engine(self, number: int, config: EngineConfig, setup: EngineSetup) -> Engine:
        return RayEngine(
            f"engine {number}",
            WorkerSetup(
                origin=PluginRequirement.of(self._plugins.find("engine", config.name)),
                setup=setup,
                options=config.options,
                env_vars=config.env_vars,
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
