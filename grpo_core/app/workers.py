"""Makes the engine or the pool of engines of a section, and the workers of an environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import evolve

from grpo_core.app.placement import Placement
from grpo_core.config import EngineConfig, EnvironmentConfig, TaskConfig
from grpo_core.contracts.errors import ConfigError, SelectionError
from grpo_core.contracts.protocols import Engine
from grpo_core.contracts.records import EngineSetup
from grpo_core.engines.addresses import is_loopback
from grpo_core.engines.wrapped import LimitedEngine
from grpo_core.environments.pool import EnvironmentPool, EnvironmentSpec
from grpo_core.loop.agreement import Tolerance
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.transports import find_transport

AGENT_PROCESSES = 8
"""Largest number of processes of an agent, unless ``environment.workers`` is set."""


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

    def one(number: int, setup: EngineSetup) -> Engine:
        """Make the engine with this number; further engines share the places of the first."""
        variables = env_vars[number % len(env_vars)] if env_vars else {}
        engine = placement.engine(number, config, evolve(setup, env_vars=variables))
        return LimitedEngine(engine, config.max_requests) if config.max_requests else engine

    def member(number: int) -> Engine:
        """Make an engine of the pool, with its share of the cores, and its own directory for logs."""
        threads = config.threads or max(1, setup.threads // config.workers)
        logs = f"{setup.log_directory}/engine-{number}" if setup.log_directory else None
        return one(number, evolve(setup, number=number, threads=threads, log_directory=logs))

    if config.workers == 1 and not placement.pooled:
        return one(0, setup)
    pool: Engine = plugins.factory("engine", plugins.the_one("engine", "pools_engines"))(
        member,
        config.workers,
        tolerance=tolerance,
        deadline=config.deadline,
        hold=placement.retain(),
    )
    return pool


def workers_of(config: EngineConfig, plugins: PluginHost) -> int:
    """Return the number of engines of a section: ``workers``, or the number in the engine's options.

    Raises ConfigError if both are set and differ, or if there are several and no pool.
    """
    selected = plugins.find("engine", config.name)
    number = config.workers
    if selected.offer.workers is not None:
        number = selected.loaded(selected.offer.workers)(**config.options)
        if config.workers not in (1, number):
            raise ConfigError(
                f"engine.workers = {config.workers}: the options of engine {config.name!r} describe "
                f"{number}; leave out engine.workers"
            )
    if number > 1:
        try:
            plugins.the_one("engine", "pools_engines")
        except SelectionError as error:
            raise ConfigError(f"engine.workers = {number}: several engines are a pool; {error}") from error
    return number


def make_environment(
    name: str,
    task: TaskConfig,
    config: EnvironmentConfig,
    placement: Placement,
    plugins: PluginHost,
    *,
    log: Path | None,
    parts: Mapping[str, str],
) -> EnvironmentPool:
    """Make the workers of a task's environment, not yet started; for ``parts`` see ``EnvironmentPool``."""
    config = of_task(config, task)
    here = not placement.pooled  # on a cluster, the workers that it has room for are known at the start
    count = config.workers or (AGENT_PROCESSES if here and not plugins.of_program(task.env) else 1)
    logs = [log.with_stem(f"{log.stem}-{i}") if i and log else log for i in range(count)]
    spec = EnvironmentSpec(task=name, env=task.env, options=task.options, config=config)
    workers = [placement.environment(i, evolve(spec, log=logs[i])) for i in range(count)]
    return EnvironmentPool(
        workers,
        config,
        for_agents=config.workers is None,
        on_demand=here,
        name=name,
        success=task.success,
        parts=parts,
    )


def of_task(config: EnvironmentConfig, task: TaskConfig) -> EnvironmentConfig:
    """Return the environment section for a task, whose own keys take precedence."""
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
        validation: validation's own engine, if any.
        from_here: whether the trainer's processes are on this machine.

    Raises ConfigError if an engine does not support it, PluginError for an unknown engine or transport.
    """
    engines = [engine] if validation is None else [engine, validation]
    if validation is not None and (validation.transport != "auto" or validation.transport_options):
        raise ConfigError("validation.engine.transport: weights come to all engines by engine.transport")
    chosen = engine.transport
    if chosen == "auto":
        chosen = "shm" if from_here else plugins.the_one("transport", "crosses_machines")
    offer = find_transport(chosen, plugins, engine.transport_options)
    if engine.transport == "auto" and from_here:
        return chosen
    declared = [set(plugins.find("engine", each.name).offer.transports) for each in engines]
    takes = set.intersection(*(each | {chosen} if "*" in each else each for each in declared))
    if chosen not in takes:
        names = " and ".join(repr(each.name) for each in engines)
        raise ConfigError(
            f"engine.transport = {chosen!r}: engine {names} takes weights by {', '.join(sorted(takes))} only"
        )
    setting, shared = f'engine.transport = "{engine.transport}"', any(each.workers > 1 for each in engines)
    host, near = f"engine.transport_options.host = {offer.host!r}", is_loopback(offer.host)
    if not from_here and not offer.remote:
        raise ConfigError(
            f"{setting} needs a trainer on this machine, but this one is in workers, perhaps on several: "
            "leave it out"
        )
    if not from_here and not near:
        raise ConfigError(
            f"{host}: each process of this trainer listens at its own machine's address; leave it out"
        )
    if from_here and offer.remote and placement.remote and near:
        raise ConfigError(
            f"{setting}: workers on other machines cannot reach {host}; set it to an address of this machine "
            "in the cluster's network"
        )
    if from_here and not offer.several and (placement.pooled or shared):
        raise ConfigError(
            f"{setting} is for one engine: a late one of several would read the trainer's next "
            'weights; use "shm"'
        )
    return chosen
