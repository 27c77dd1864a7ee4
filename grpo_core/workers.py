"""Where engines and environments run: one child process each, several, or workers of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from attrs import evolve

from grpo_core.config import Config, TaskConfig
from grpo_core.engines.pool import EnginePool
from grpo_core.engines.transports import Transport, transports_of
from grpo_core.environments.pool import EnvironmentPool, EnvironmentWorker
from grpo_core.environments.process import EnvironmentProcess
from grpo_core.errors import ConfigError
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import Engine
from grpo_core.records import EngineSetup
from grpo_core.weights.copies import Copies

STRATEGIES = {"pack": "DEFAULT", "spread": "SPREAD"}
"""Ray's names of ``engine.placement``."""

LOOPBACK = ("127.0.0.1", "::1", "localhost")

Tell = Callable[[str], None]
MakeEnvironment = Callable[[int, Path | None], EnvironmentWorker]
"""Of a number and a log file."""


@contextlib.contextmanager
def cluster(config: Config) -> Iterator[None]:
    """The Ray cluster of a run, if it has one.  Raises ConfigError."""
    if not config.ray.enabled:
        for key, given in _needs_ray(config):
            if given:
                raise ConfigError(f"{key} is for Ray workers; add --ray, or leave it out")
        yield
        return
    from grpo_core.ray_workers.cluster import connected

    wanted = config.engine.workers + config.environment.workers * len(config.tasks)
    with connected(config.ray.address, cpus=max(wanted, os.cpu_count() or 1)):
        yield


def _needs_ray(config: Config) -> Iterator[tuple[str, object]]:
    yield "engine.gpus_per_worker", config.engine.gpus_per_worker
    yield "engine.env_vars", config.engine.env_vars
    yield "ray.address", config.ray.address


def make_engine(
    config: Config, host: PluginHost, setup: EngineSetup, *, tolerance: float, tell: Tell
) -> Engine:
    """The engine of a configuration, or a pool of them.

    Args:
        tolerance: of the members' canaries.
        tell: is told of members that are replaced.
    """
    engine = config.engine
    if config.ray.enabled:
        return _ray_pool(config, host, setup, tolerance, tell)
    if engine.workers == 1:
        return _one(config, host, setup)
    copies = Copies()
    return EnginePool(
        lambda number: _one(config, host, _of_member(config, setup, number)),
        engine.workers,
        tolerance=tolerance,
        deadline=engine.deadline,
        hold=copies.hold,
        tell=tell,
    )


def transport(config: Config, host: PluginHost) -> Transport:
    """How the trainer's weights come to the engines.

    Raises ConfigError if an engine cannot take them so, PluginError if there is no such engine.
    """
    engines = [config.engine]
    if config.validation.engine is not None and config.validation.every:
        engines.append(config.validation.engine)
        if config.validation.engine.transport != "auto":
            raise ConfigError("validation.engine.transport: weights come to all engines by engine.transport")
    shared = config.ray.enabled or any(engine.workers > 1 for engine in engines)
    takes = set.intersection(*(_transports(host, engine.name) for engine in engines))
    chosen = config.engine.transport
    reachable = not config.ray.address or config.engine.collective_host not in LOOPBACK
    if chosen == "auto":
        return "shm"
    if chosen not in takes:
        names = " and ".join(repr(engine.name) for engine in engines)
        raise ConfigError(
            f"engine.transport = {chosen!r}: engine {names} takes weights by {', '.join(sorted(takes))} only"
        )
    if chosen == "collective" and not reachable:
        raise ConfigError(
            'engine.transport = "collective": workers on other machines cannot reach '
            f"engine.collective_host = {config.engine.collective_host!r}; set it to an address of this "
            "machine in the cluster's network"
        )
    if chosen == "cuda_ipc" and shared:
        raise ConfigError(
            'engine.transport = "cuda_ipc" is for one engine: of several, one that is late would read what '
            'the trainer writes next; use "collective" or "shm"'
        )
    return chosen


def _transports(host: PluginHost, engine: str) -> set[Transport]:
    return set(transports_of(host.find("engine", engine).load()))


def _one(config: Config, host: PluginHost, setup: EngineSetup) -> Engine:
    if setup.log_directory:
        Path(setup.log_directory).mkdir(parents=True, exist_ok=True)
    engine: Engine = host.make("engine", config.engine.name, setup, **config.engine.options)
    return engine


def _of_member(config: Config, setup: EngineSetup, number: int) -> EngineSetup:
    """Its share of the cores, and a directory of its own for its logs."""
    return evolve(
        setup,
        threads=config.engine.threads or max(1, setup.threads // config.engine.workers),
        log_directory=f"{setup.log_directory}/engine-{number}" if setup.log_directory else None,
    )


def _ray_pool(
    config: Config, host: PluginHost, setup: EngineSetup, tolerance: float, tell: Tell
) -> EnginePool:
    from grpo_core.ray_workers.cluster import PluginRequirement
    from grpo_core.ray_workers.engines import RayEngine, Store, WorkerSetup

    engine = config.engine
    origin = PluginRequirement.of(host.find("engine", engine.name))
    store = Store()

    def make(number: int) -> Engine:
        return RayEngine(
            f"engine {number}",
            WorkerSetup(
                origin=origin,
                setup=_of_member(config, setup, number),
                options=engine.options,
                env_vars=engine.env_vars,
            ),
            store=store,
            resources={
                "num_cpus": 1,
                "num_gpus": engine.gpus_per_worker,
                "scheduling_strategy": STRATEGIES[engine.placement],
            },
        )

    return EnginePool(
        make,
        engine.workers,
        tolerance=tolerance,
        deadline=engine.deadline,
        hold=store.hold,
        tell=tell,
    )


def make_environment(
    name: str, task: TaskConfig, config: Config, block: Sequence[str], log: Path | None
) -> EnvironmentPool:
    """The workers of a task's environment; not started yet."""
    make = (_ray_environments if config.ray.enabled else _processes)(name, task, config, block)
    count = config.environment.workers
    logs = [log if count == 1 or log is None else log.with_stem(f"{log.stem}-{i}") for i in range(count)]
    return EnvironmentPool([make(i, logs[i]) for i in range(count)], config.environment)


def _processes(name: str, task: TaskConfig, config: Config, block: Sequence[str]) -> MakeEnvironment:
    return lambda number, log: EnvironmentProcess(
        name,
        task.env,
        task.options,
        config=config.environment,
        allow=config.plugins,
        block=block,
        log=log,
    )


def _ray_environments(name: str, task: TaskConfig, config: Config, block: Sequence[str]) -> MakeEnvironment:
    from grpo_core.ray_workers.cluster import PluginRequirement
    from grpo_core.ray_workers.environments import EnvironmentSetup, RayEnvironment

    origin = PluginRequirement.of(PluginHost.discover(config.plugins, block).find("environment", task.env))

    return lambda number, log: RayEnvironment(
        f"environment {name} {number}",
        EnvironmentSetup(
            task=name,
            origin=origin,
            options=task.options,
            config=config.environment,
            log=str(log.resolve()) if log else None,
        ),
        resources={"num_cpus": 1, "scheduling_strategy": STRATEGIES["spread"]},
    )
