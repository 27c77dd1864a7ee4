"""The placement ``local`` for pools of engines and for trainers of several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from grpo_core import ConfigError, Engine, EngineSetup
from grpo_core.app import placement
from grpo_core.config import EngineConfig
from grpo_core.loop.agreement import Tolerance
from grpo_core.plugins.transports import find_transport
from grpo_core.storage import copies
from grpo_plugin_scale.engines.pool import pool_of


class ScaledPlacement(placement.LocalPlacement):
    """A ``Placement`` in child processes of this machine, with a pool for several engines of a section.

    Workers share the GPUs that no section names evenly; if there are more workers than GPUs, they are
    assigned round-robin.  Engines that read the memory of the trainer's GPU see it last, since they compute
    on the first ones.
    """

    def groups(self, key: str, engine: EngineConfig, count: int) -> Sequence[placement.Gpus] | None:
        named, gpus = super().groups(key, engine, count), tuple(engine.gpus)
        if named is None or not gpus:
            return named and [*named] * engine.workers
        size, left = divmod(len(gpus), engine.workers)
        if left or not size:
            raise ConfigError(
                f"{key}.gpus = {engine.gpus}: {len(gpus)} GPUs for {engine.workers} workers ({key}.workers); "
                f"each gets the same number: name {engine.workers * (size + 1)}"
                + (f" or {engine.workers * size}" if size else "")
            )
        return [gpus[i * size : (i + 1) * size] for i in range(engine.workers)]

    def free(
        self, engines: Mapping[str, EngineConfig], used: set[int], count: int, ranks: int
    ) -> placement.Gpus:
        for engine in engines.values():
            if engine.gpus and self._joined(engine):
                return (engine.gpus[-1],)
        if ranks > 1 and (left := count - len(used)) < ranks:
            raise ConfigError(
                f"trainer.ranks = {ranks}: each rank needs its own GPU, and {left} of the {count} GPUs of "
                "this machine are free; lower it, or give the engines fewer"
            )
        return super().free(engines, used, count, ranks)

    def shares(self, gpus: placement.Gpus, workers: int) -> Iterator[placement.Gpus]:
        size = max(1, len(gpus) // max(1, workers))
        for worker in range(workers):
            yield tuple(gpus[(worker * size + i) % len(gpus)] for i in range(size))

    def visible_to(
        self, key: str, engine: EngineConfig, groups: Sequence[placement.Gpus], trains: placement.Gpus
    ) -> Sequence[placement.Gpus]:
        if not self._joined(engine):
            return super().visible_to(key, engine, groups, trains)
        if trains and engine.gpus and {*trains}.isdisjoint(engine.gpus):
            raise ConfigError(
                f'{key}.transport = "{engine.transport}": the engine must see the trainer\'s GPU '
                f'{trains[0]}, and {key}.gpus = {engine.gpus}; name it there last, or use "shm"'
            )
        return [(*(gpu for gpu in groups[0] if gpu not in trains), *trains)] if trains else groups

    def _joined(self, engine: EngineConfig) -> bool:
        """Return whether the engine reads the memory of the trainer's GPU."""
        return engine.transport != "auto" and find_transport(engine.transport, self._plugins).same_gpu

    def engine(
        self,
        config: EngineConfig,
        setup: EngineSetup,
        env_vars: Sequence[Mapping[str, str]],
        tolerance: Tolerance,
    ) -> Engine:
        if config.workers == 1:
            return super().engine(config, setup, env_vars, tolerance)
        return pool_of(super().engine, config, setup, env_vars, tolerance, copies.Copies().hold)
