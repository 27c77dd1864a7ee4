"""The placement ``ray``: each engine and each environment in a Ray actor."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from typing import Any, cast

from attrs import evolve

from grpo_core import ConfigError, Engine, EngineSetup
from grpo_core.config import EngineConfig, TrainerConfig
from grpo_core.engines.wrapped import LimitedEngine
from grpo_core.kit import Devices, EnvironmentSpec, EnvironmentWorker, PluginHost
from grpo_core.loop.agreement import Tolerance
from grpo_core.processes import interpreters
from grpo_plugin_ray.cluster import PluginRequirement, connected, load
from grpo_plugin_ray.engines import RayEngine, Store, WorkerSetup
from grpo_plugin_ray.environments import EnvironmentSetup, RayEnvironment

STRATEGIES = {"pack": "DEFAULT", "spread": "SPREAD"}
"""Ray's scheduling strategies for ``engine.placement``."""

NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""Environment variables of a worker without GPUs, which would otherwise see all of them."""

PATIENCE = 30.0
"""Time limit in seconds for Ray to grant a GPU, which is immediate if one is free."""


class RayPlacement:
    """A ``Placement`` of engines and environments in Ray workers.

    Args:
        address: address of a running cluster ("auto", "host:6379"); empty starts a local one for the run.
    """

    pooled = True

    def __init__(self, plugins: PluginHost, *, address: str = "") -> None:
        self.remote = bool(address)
        self._plugins, self.address = plugins, address
        self._store = Store()
        self._reservation: Reservation | None = None

    def check(
        self, trainer: TrainerConfig | None, engines: Mapping[str, EngineConfig], ranks: int = 1
    ) -> None:
        """Raise ConfigError for keys that name GPUs, and for unset variables in ``env_vars``."""
        for key, engine in engines.items():
            if engine.gpus:
                raise ConfigError(
                    f"{key}.gpus = {engine.gpus}: Ray chooses the GPUs of its workers; leave it out, and set "
                    f"{key}.gpus_per_worker"
                )
            interpreters.from_here(engine.env_vars, f"{key}.env_vars")
        if trainer is not None and ranks > 1 and trainer.device != "cpu":
            raise ConfigError(
                f"trainer.ranks = {ranks}: Ray reserves one GPU for a trainer of this machine; set "
                'trainer.name = "ray", whose ranks are in Ray workers, or trainer.device = "cpu"'
            )
        if trainer is not None and (given := named_gpus(trainer)):
            raise ConfigError(
                f"trainer.{given}: Ray reserves a GPU of this machine for the trainer; leave it out"
            )

    def connected(self, workers: int) -> contextlib.AbstractContextManager[None]:
        return connected(self.address, cpus=max(workers, os.cpu_count() or 1))

    def devices(
        self, trainer: TrainerConfig | None, engines: Mapping[str, EngineConfig], ranks: int = 1
    ) -> Devices:
        """Reserve a GPU of this machine for the trainer, if it uses one and the cluster has one here.

        Engines whose ``gpus_per_worker`` is below 1 share the only GPU of a machine with the trainer.
        Raises ConfigError if there are too few.
        """
        here = gpus_here() if trainer is not None and trainer.device != "cpu" else 0
        if not here:
            return Devices()
        shared = frozenset(key for key, engine in engines.items() if 0 < engine.gpus_per_worker < 1)
        shares = here == 1 and bool(shared)
        needed = sum(engine.workers * engine.gpus_per_worker for engine in engines.values())
        if not self.remote and needed > (here if shares else here - 1):
            raise ConfigError(
                f"this machine has {here} GPU{'s' * (here > 1)}; the engines need {needed:g} "
                "(engine.workers x engine.gpus_per_worker) in addition to the trainer's: lower one of both. "
                "Below 1 GPU for each worker, engines share the only GPU of a machine with the trainer"
            )
        if shares:
            return Devices(shared=shared, summary="the trainer shares this machine's only GPU with engines")
        self._reservation = Reservation()
        return Devices(
            trainer=self._reservation.env_vars(),
            summary=f"Ray has reserved GPU {self._reservation.gpu} of this machine for the trainer",
        )

    def engine(
        self,
        config: EngineConfig,
        setup: EngineSetup,
        env_vars: Sequence[Mapping[str, str]],
        tolerance: Tolerance,
    ) -> Engine:
        """Make a pool, also for one engine: it can be lost with its machine."""
        name = self._plugins.the_one("engine", "pools_engines")
        pool = self._plugins.factory("engine", name)
        return cast(Engine, pool(self._one, config, setup, env_vars, tolerance, self._store.hold))

    def _one(
        self, config: EngineConfig, setup: EngineSetup, env_vars: Sequence[Mapping[str, str]], _: Tolerance
    ) -> Engine:
        directory = self._plugins.selection.directory
        engine = RayEngine(
            f"engine {setup.number}",
            WorkerSetup(
                origin=PluginRequirement.of(self._plugins.find("engine", config.name), directory),
                setup=evolve(setup, env_vars=env_vars[0]),
                options=config.options,
                env_vars=({} if config.gpus_per_worker else NO_GPU)
                | interpreters.from_here(config.env_vars, "engine.env_vars"),
            ),
            store=self._store,
            resources={
                "num_cpus": 1,
                "num_gpus": config.gpus_per_worker,
                "scheduling_strategy": STRATEGIES[config.placement],
            },
        )
        return LimitedEngine(engine, config.max_requests) if config.max_requests else engine

    def environment(self, number: int, spec: EnvironmentSpec) -> EnvironmentWorker:
        directory = self._plugins.selection.directory
        if spec.config.python:
            origin = PluginRequirement.elsewhere(spec.env, directory)
        else:
            origin = PluginRequirement.of(self._plugins.find("environment", spec.env), directory)
        return RayEnvironment(
            f"environment {spec.task} {number}",
            EnvironmentSetup(
                spec=evolve(spec, env=origin.name, log=spec.log and spec.log.resolve()),
                origin=origin,
                variables=interpreters.variables_of(spec.config.env_vars, "environment.env_vars"),
            ),
            resources={"num_cpus": 1, "scheduling_strategy": STRATEGIES["spread"]},
        )


def named_gpus(trainer: TrainerConfig) -> str:
    """Return the key that names GPUs, with its value; empty without one."""
    if trainer.gpus:
        return f"gpus = {trainer.gpus}"
    return f'device = "{trainer.device}"' if trainer.device.startswith("cuda:") else ""


def gpus_here() -> int:
    """Return Ray's number of GPUs on this machine; 0 if it is not part of the cluster."""
    ray = load()
    if ray.util.client.ray.is_connected():
        return 0  # a client from outside of the cluster
    here = ray.get_runtime_context().get_node_id()
    return sum(int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["NodeID"] == here)


class Holder:
    """An actor that reserves a GPU for the trainer."""

    def visible(self) -> str:
        """Return Ray's value of ``CUDA_VISIBLE_DEVICES``."""
        return os.environ["CUDA_VISIBLE_DEVICES"]


class Reservation:
    """A GPU of this machine that Ray reserves while the driver is connected.

    Raises ConfigError if none is free.
    """

    def __init__(self) -> None:
        ray = load()
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
            ray.get_runtime_context().get_node_id(), soft=False
        )
        actor: Any = ray.remote(Holder)
        self._holder = actor.options(num_cpus=0, num_gpus=1, scheduling_strategy=strategy).remote()
        try:
            self.gpu: str = ray.get(self._holder.visible.remote(), timeout=PATIENCE)
        except ray.exceptions.GetTimeoutError:
            ray.kill(self._holder)
            raise ConfigError(
                f"the trainer needs a GPU of this machine, and Ray gave it none within {PATIENCE:g} s; the "
                f"cluster has {ray.available_resources()} free. End what uses the GPUs, or set "
                'trainer.device = "cpu"'
            ) from None

    def env_vars(self) -> dict[str, str]:
        """Return environment variables that make only this GPU visible."""
        return {"CUDA_VISIBLE_DEVICES": self.gpu}
