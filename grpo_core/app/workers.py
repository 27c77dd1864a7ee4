"""Makes the engine or the pool of engines of a section, and the workers of an environment."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from attrs import evolve

from grpo_core.addresses import is_loopback
from grpo_core.app.placement import Placement
from grpo_core.config import EngineConfig, EnvironmentConfig, TaskConfig
from grpo_core.engines.limited import LimitedEngine
from grpo_core.environments.pool import EnvironmentPool, EnvironmentSpec
from grpo_core.errors import ConfigError, SelectionError
from grpo_core.hookspecs import Transport
from grpo_core.loop.agreement import Tolerance
from grpo_core.plugins.host import PluginHost
from grpo_core.protocols import Engine
from grpo_core.records import EngineSetup
from grpo_core.weights.transports import find_transport

POOL = "pool"
"""Name of the engine that is made of others: ``factory(make, workers, *, tolerance, deadline, hold)``."""


def make_engine(
    config: EngineConfig,
    setup: EngineSetup,
    placement: Placement,
    plugins: PluginHost,
    *,
    tolerance: Tolerance,
    env_vars: Sequence[Mapping[str, str]] = (),
) -> Engine:
    """Make the engine of a section, or a pool of engines.

    Args:
        setup: setup of a single engine; a pool divides its threads.
        tolerance: tolerance of the pool's canaries.
        env_vars: environment variables of each engine's process, by number.
    """
    config = evolve(config, workers=workers_of(config, plugins))

    def limited(engine: Engine) -> Engine:
        return LimitedEngine(engine, config.max_requests) if config.max_requests else engine

    if config.workers == 1 and not placement.pooled:
        return limited(placement.engine(0, config, evolve(setup, env_vars=_of(env_vars, 0))))
    make_pool = plugins.find("engine", POOL).load()
    pool: Engine = make_pool(
        lambda number: limited(
            placement.engine(
                number, config, _share(config, evolve(setup, env_vars=_of(env_vars, number)), number)
            )
        ),
        config.workers,
        tolerance=tolerance,
        deadline=config.deadline,
        hold=placement.retain(),
    )
    return pool


def workers_of(config: EngineConfig, plugins: PluginHost) -> int:
    """Return the number of engines of a section: ``workers``, or as many as the engine's options describe.

    Raises ConfigError if both are given and differ, or if there are several and nothing that pools them.
    """
    number = _described(config, plugins)
    if number > 1:
        try:
            plugins.find("engine", POOL)
        except SelectionError as error:
            raise ConfigError(f"engine.workers = {number}: several engines are a pool; {error}") from error
    return number


def _described(config: EngineConfig, plugins: PluginHost) -> int:
    selected = plugins.find("engine", config.name)
    if selected.offer.workers is None:
        return config.workers
    described: int = selected.loaded(selected.offer.workers)(**config.options)
    if config.workers not in (1, described):
        raise ConfigError(
            f"engine.workers = {config.workers}: the options of engine {config.name!r} describe {described}; "
            "leave out engine.workers"
        )
    return described


def _of(env_vars: Sequence[Mapping[str, str]], number: int) -> Mapping[str, str]:
    """Return the variables of the engine with this number; further engines share the places of the first."""
    return env_vars[number % len(env_vars)] if env_vars else {}


def _share(config: EngineConfig, setup: EngineSetup, number: int) -> EngineSetup:
    """Give an engine its share of the cores, and its own directory for logs."""
    return evolve(
        setup,
        number=number,
        threads=config.threads or max(1, setup.threads // config.workers),
        log_directory=f"{setup.log_directory}/engine-{number}" if setup.log_directory else None,
    )


def make_environment(
    name: str, task: TaskConfig, config: EnvironmentConfig, placement: Placement, *, log: Path | None
) -> EnvironmentPool:
    """Make the workers of a task's environment, which are not started yet."""
    config = of_task(config, task)
    count = config.workers
    logs = [log if count == 1 or log is None else log.with_stem(f"{log.stem}-{i}") for i in range(count)]
    spec = EnvironmentSpec(task=name, env=task.env, options=task.options, config=config)
    workers = [placement.environment(i, evolve(spec, log=logs[i])) for i in range(count)]
    return EnvironmentPool(workers, config, success=task.success)


def of_task(config: EnvironmentConfig, task: TaskConfig) -> EnvironmentConfig:
    """Return the section for environments as it is for a task, whose own keys come first."""
    return evolve(config, python=task.python or config.python, env_vars={**config.env_vars, **task.env_vars})


def transport(
    engine: EngineConfig,
    validation: EngineConfig | None,
    placement: Placement,
    plugins: PluginHost,
    *,
    from_here: bool = True,
) -> str:
    """Choose the transport of weights from the trainer to the engines.

    Args:
        validation: the engine that only validation uses, if there is one.
        from_here: whether the trainer's processes are on this machine.

    Raises ConfigError if an engine does not support it, PluginError for an unknown engine or transport.
    """
    engines = [engine] if validation is None else [engine, validation]
    if validation is not None and validation.transport != "auto":
        raise ConfigError("validation.engine.transport: weights come to all engines by engine.transport")
    if engine.transport != "auto":
        chosen = engine.transport
    elif from_here:
        return "shm"
    else:
        chosen = "collective"
    offer = find_transport(chosen, plugins)
    takes = set.intersection(*(_transports(plugins, each.name, chosen) for each in engines))
    if chosen not in takes:
        names = " and ".join(repr(each.name) for each in engines)
        raise ConfigError(
            f"engine.transport = {chosen!r}: engine {names} takes weights by {', '.join(sorted(takes))} only"
        )
    shared = any(each.workers > 1 for each in engines)
    here = _impossible(engine, offer, placement, shared)
    for problem in here if from_here else _not_from_elsewhere(engine, offer):
        raise ConfigError(problem)
    return chosen


def _not_from_elsewhere(engine: EngineConfig, offer: Transport) -> Iterator[str]:
    """Yield reasons why engines cannot reach a trainer in the workers of a placement as configured."""
    if not offer.remote:
        yield (
            f'engine.transport = "{engine.transport}" is for a trainer of this machine, and this one is in '
            'workers, which may be on several: use "collective", or leave it out'
        )
    if not is_loopback(engine.collective_host):
        yield (
            f"engine.collective_host = {engine.collective_host!r}: each process of this trainer listens at "
            "its own machine's address; leave it out"
        )


def _impossible(engine: EngineConfig, offer: Transport, placement: Placement, shared: bool) -> Iterator[str]:
    """Yield reasons why the chosen transport cannot reach the engines from this machine."""
    told = f'engine.transport = "{engine.transport}"'
    if offer.remote and placement.remote and is_loopback(engine.collective_host):
        yield (
            f"{told}: workers on other machines cannot reach engine.collective_host = "
            f"{engine.collective_host!r}; set it to an address of this machine in the cluster's network"
        )
    if not offer.several and (placement.pooled or shared):
        yield (
            f"{told} is for one engine: of several, one that is late would read what the trainer writes "
            'next; use "collective" or "shm"'
        )


def _transports(plugins: PluginHost, engine: str, chosen: str) -> set[str]:
    declared = set(plugins.find("engine", engine).offer.transports)
    return declared | {chosen} if "*" in declared else declared
