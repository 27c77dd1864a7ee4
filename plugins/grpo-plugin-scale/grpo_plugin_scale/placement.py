"""The placement ``local`` for pools of engines and for trainers of several ranks."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from grpo_core import ConfigError, Engine, EngineSetup
from grpo_core.app import placement
from grpo_core.config import EngineConfig, TrainerConfig
from grpo_core.kit import Devices
from grpo_core.loop.agreement import Tolerance
from grpo_core.plugins.transports import find_transport
from grpo_core.storage import copies
from grpo_plugin_scale.engines.pool import pool_of


class ScaledPlacement(placement.LocalPlacement):
    """A ``Placement`` in child processes of this machine, with a pool for several engines of a section."""

    def choose(
        self, trainer: TrainerConfig | None, engines: Mapping[str, EngineConfig], count: int, ranks: int = 1
    ) -> Devices:
        """Assign GPUs to the trainer's ranks and each worker of each engine, as configured or by this rule.

        The trainer gets the first GPUs that no engine is configured with, and the workers share the rest
        evenly; if there are more workers than GPUs, they are assigned round-robin.  Engines that read the
        memory of the trainer's GPU see it last, since they compute on the first ones.
        """
        if trainer is not None:
            if ranks > 1 and trainer.device.startswith("cuda:"):
                raise ConfigError(
                    f'trainer.device = "{trainer.device}" is one GPU for {ranks} ranks (trainer.ranks); use '
                    '"cuda", and name their GPUs in trainer.gpus'
                )
            placement.check_trainer(trainer, count, ranks)
        given = {key: _groups(key, engine, count) for key, engine in engines.items()}
        if not count:
            return Devices()
        named = {key: engine.transport for key, engine in engines.items() if engine.transport != "auto"}
        joined = {key for key, name in named.items() if find_transport(name, self._plugins).same_gpu}
        used = {gpu for groups in given.values() for group in groups or () for gpu in group}
        own = () if trainer is None else placement.named_gpus(trainer.gpus, trainer.device)
        trains = _free(engines, used, count, joined, ranks) if own is None else own
        others = [gpu for gpu in range(count) if gpu not in trains]
        rest = [gpu for gpu in others if gpu not in used] or others or [*trains]
        shares = _shares(rest, sum(engines[key].workers for key, groups in given.items() if groups is None))
        chosen: dict[str, list[placement.Gpus]] = {}
        shared = set()
        for key, engine in engines.items():
            groups = given[key] or [next(shares) for _ in range(engine.workers)]
            computes = groups
            if key not in joined:
                placement.check_overlap(key, engine, trains)
            elif trains:
                if engine.gpus and {*trains}.isdisjoint(engine.gpus):
                    raise ConfigError(
                        f'{key}.transport = "{engine.transport}": the engine must see the trainer\'s GPU '
                        f'{trains[0]}, and {key}.gpus = {engine.gpus}; name it there last, or use "shm"'
                    )
                seen = groups[0] if given[key] else rest
                groups = [(*(gpu for gpu in seen if gpu not in trains), *trains)]
                computes = [groups[0][:1]]
            chosen[key] = groups
            if any({*trains}.intersection(group) for group in computes):
                shared.add(key)
        return placement.assigned(trainer, engines, trains, chosen, shared, count)

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


def _groups(key: str, engine: EngineConfig, count: int) -> list[placement.Gpus] | None:
    """Return the GPUs of each worker that the section names; None if it names none."""
    gpus = placement.named_gpus(engine.gpus, engine.options.get("device"))
    if gpus is None or not engine.gpus:
        return None if gpus is None else [gpus] * engine.workers
    placement.check_list(f"{key}.gpus", gpus, count)
    size, left = divmod(len(gpus), engine.workers)
    if left or not size:
        raise ConfigError(
            f"{key}.gpus = {engine.gpus}: {len(gpus)} GPUs for {engine.workers} workers ({key}.workers); "
            f"each gets the same number: name {engine.workers * (size + 1)}"
            + (f" or {engine.workers * size}" if size else "")
        )
    return [gpus[i * size : (i + 1) * size] for i in range(engine.workers)]


def _free(
    engines: Mapping[str, EngineConfig], used: set[int], count: int, joined: Collection[str], ranks: int
) -> placement.Gpus:
    """Return the GPUs of a trainer that names none."""
    for key, engine in engines.items():
        if key in joined and engine.gpus:
            return (engine.gpus[-1],)
    if ranks > 1 and count - len(used) < ranks:
        raise ConfigError(
            f"trainer.ranks = {ranks}: each rank needs its own GPU, and {count - len(used)} of the {count} "
            "GPUs of this machine are free; lower it, or give the engines fewer"
        )
    return placement.first_free(engines, used, count, ranks)


def _shares(gpus: Sequence[int], workers: int) -> Iterator[placement.Gpus]:
    """Yield an equal share of the GPUs for each worker."""
    size = max(1, len(gpus) // max(1, workers))
    for worker in range(workers):
        yield tuple(gpus[(worker * size + i) % len(gpus)] for i in range(size))
