"""Placements of engines and environments, the default one, and its choice of GPUs.

The default places them in child processes of this machine.  A process sees GPUs by its environment variable
``CUDA_VISIBLE_DEVICES``.  GPU numbers count the GPUs visible to grpo-core, which may be fewer than the
machine has.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from attrs import field, frozen

from grpo_core.config import EngineConfig, TrainerConfig
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.protocols import Engine
from grpo_core.contracts.records import EngineSetup, Weights
from grpo_core.environments.pool import EnvironmentSpec, EnvironmentWorker
from grpo_core.environments.process import EnvironmentProcess
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.transports import find_transport
from grpo_core.storage.copies import Copies, WeightsLease

Retain = Callable[[Weights], Awaitable[WeightsLease]]
"""Takes a lease of published weights that outlives the trainer's next publication."""


Gpus = tuple[int, ...]
"""The GPUs of one process; empty for a process that uses none."""

DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd", "/dev/dxg")
"""Device files of the GPU drivers of NVIDIA, AMD and WSL."""


@frozen(kw_only=True)
class Devices:
    """The GPUs of a run, as environment variables of its processes."""

    trainer: Mapping[str, str] = field(factory=dict)
    """Environment variables of the trainer's process."""
    engines: Mapping[str, Sequence[Mapping[str, str]]] = field(factory=dict)
    """Environment variables of each worker, by the engine's key; empty if they get GPUs in another way."""
    shared: frozenset[str] = frozenset()
    """Keys of the engines that share a GPU with the trainer."""
    told: str = ""
    """The choice in words, for the user; empty if there was none."""


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
        self.devices(trainer, engines, ranks)

    def connected(self, workers: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def devices(
        self, trainer: TrainerConfig | None, engines: Mapping[str, EngineConfig], ranks: int = 1
    ) -> Devices:
        return choose(trainer, engines, visible(), joined_to_trainer(engines, self._plugins), ranks)

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


# ---------------------------------------------------------------------------------- GPUs


def visible() -> int:
    """Return the number of GPUs that this process sees."""
    if not any(Path(path).exists() for path in DRIVERS):
        return 0  # importing torch takes a second
    import torch

    return torch.cuda.device_count()


def joined_to_trainer(engines: Mapping[str, EngineConfig], plugins: PluginHost) -> set[str]:
    """Return the keys of the engines that read the memory of the trainer's GPU."""
    named = {key: engine.transport for key, engine in engines.items() if engine.transport != "auto"}
    return {key for key, name in named.items() if find_transport(name, plugins).same_gpu}


def choose(
    trainer: TrainerConfig | None,
    engines: Mapping[str, EngineConfig],
    count: int,
    joined: Collection[str] = (),
    ranks: int = 1,
) -> Devices:
    """Assign GPUs to the trainer and each worker of each engine, as configured or by this rule.

    The trainer gets the first GPU that no engine is configured with, and the workers share the rest evenly;
    if there are more workers than GPUs, they are assigned round-robin.

    Args:
        trainer: None if nothing is trained.
        engines: sections by key, as in "validation.engine".
        count: number of GPUs of this machine.
        joined: keys of engines that read the memory of the trainer's GPU.  They see it last, since they
            compute on the first ones.
        ranks: number of the trainer's processes, each with one GPU.

    Raises ConfigError if configured GPUs do not exist, have the wrong number, or collide.
    """
    if trainer is not None:
        _check_trainer(trainer, count, ranks)
    given = {key: _groups(key, engine, count) for key, engine in engines.items()}
    if not count:
        return Devices()
    used = {gpu for groups in given.values() for group in groups or () for gpu in group}
    own = () if trainer is None else _named(trainer.gpus, trainer.device)
    trains = _free(engines, used, count, joined, ranks) if own is None else own
    others = [gpu for gpu in range(count) if gpu not in trains]
    rest = [gpu for gpu in others if gpu not in used] or others or [*trains]
    shares = _shares(rest, sum(engines[key].workers for key, groups in given.items() if groups is None))
    chosen: dict[str, list[Gpus]] = {}
    shared = set()
    for key, engine in engines.items():
        groups = given[key] or [next(shares) for _ in range(engine.workers)]
        _check_overlap(key, engine, trains, joined=key in joined)
        computes = groups
        if key in joined and trains:
            seen = groups[0] if given[key] else rest
            groups = [(*(gpu for gpu in seen if gpu not in trains), *trains)]
            computes = [groups[0][:1]]
        chosen[key] = groups
        if any({*trains}.intersection(group) for group in computes):
            shared.add(key)
    if count == 1:
        return Devices(shared=frozenset(shared))
    return Devices(
        trainer={} if trainer and not trainer.gpus and own else _variables(trains),
        engines={
            key: [{} if given[key] and not engines[key].gpus else _variables(group) for group in groups]
            for key, groups in chosen.items()
        },
        shared=frozenset(shared),
        told=_summary(trains, chosen),
    )


# ---------------------------------------------------------------------------------- what is configured


def _named(gpus: Sequence[int] | None, device: object) -> Gpus | None:
    """Return the GPUs that a section names, none for "cpu"; None if it leaves the choice to us."""
    if gpus or device == "cpu":
        return tuple(gpus or ())
    found = re.fullmatch(r"cuda:(\d+)", device) if isinstance(device, str) else None
    return (int(found[1]),) if found else None


def _check_trainer(trainer: TrainerConfig, count: int, ranks: int) -> None:
    """Raise ConfigError if the trainer's keys contradict each other or the machine."""
    device, gpus = trainer.device, trainer.gpus
    if device.startswith("cuda") and not count:
        raise ConfigError(
            f'trainer.device = "{device}": this process sees no GPU; set it to "auto" or "cpu", or fix the '
            "driver (grpo-core doctor)"
        )
    if gpus and len(gpus) != ranks:
        raise ConfigError(
            f"trainer.gpus = {gpus}: each of the {ranks} ranks (trainer.ranks) computes on one GPU; name "
            f"{ranks}"
        )
    if gpus and device not in ("auto", "cuda"):
        raise ConfigError(
            f'trainer.gpus = {gpus} and trainer.device = "{device}" exclude each other; leave one of them out'
        )
    if ranks > 1 and device.startswith("cuda:"):
        raise ConfigError(
            f'trainer.device = "{device}" is one GPU for {ranks} ranks (trainer.ranks); use "cuda", and name '
            "their GPUs in trainer.gpus"
        )
    _check_list("trainer.gpus", gpus or (), count)


def _check_list(key: str, gpus: Sequence[int], count: int) -> None:
    if twice := [gpu for gpu, times in Counter(gpus).items() if times > 1]:
        raise ConfigError(f"{key} = {list(gpus)}: GPU {twice[0]} is named twice")
    if absent := [gpu for gpu in gpus if not 0 <= gpu < count]:
        here = f"{count}, numbered from 0 to {count - 1}" if count else "none that torch can use"
        raise ConfigError(f"{key} = {list(gpus)}: this machine has no GPU {absent[0]}; it has {here}")


def _groups(key: str, engine: EngineConfig, count: int) -> list[Gpus] | None:
    """Return the GPUs of each worker that the section names; None if it names none."""
    gpus = _named(engine.gpus, engine.options.get("device"))
    if gpus is None or not engine.gpus:
        return None if gpus is None else [gpus] * engine.workers
    _check_list(f"{key}.gpus", gpus, count)
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
) -> Gpus:
    """Return the GPUs of a trainer that names none: the first that no engine names."""
    for key, engine in engines.items():
        if key in joined and engine.gpus:
            return (engine.gpus[-1],)
    free = [gpu for gpu in range(count) if gpu not in used]
    if ranks > 1 and len(free) < ranks:
        raise ConfigError(
            f"trainer.ranks = {ranks}: each rank needs its own GPU, and {len(free)} of the {count} GPUs of "
            "this machine are free; lower it, or give the engines fewer"
        )
    if not free and count > 1 and any(engine.gpus for engine in engines.values()):
        raise ConfigError(
            f"the engines use all {count} GPUs of this machine: leave one for the trainer, or name the "
            "trainer's in trainer.gpus"
        )
    return tuple(free[:ranks]) or (0,)


def _check_overlap(key: str, engine: EngineConfig, trains: Gpus, *, joined: bool) -> None:
    """Reject an engine on the trainer's GPU, unless the sharing is clearly intended."""
    gpus, theirs = {*engine.gpus}, {*trains}
    if not gpus or not theirs:
        return
    if joined and not gpus & theirs:
        raise ConfigError(
            f'{key}.transport = "{engine.transport}": the engine must see the trainer\'s GPU {trains[0]}, '
            f'and {key}.gpus = {engine.gpus}; name it there last, or use "shm"'
        )
    if not joined and gpus & theirs and gpus != theirs:
        raise ConfigError(
            f"{key}.gpus = {engine.gpus}: GPU {trains[0]} is the trainer's; leave it out there, or name "
            "another one in trainer.gpus. They share a GPU only if neither has another one"
        )


# ---------------------------------------------------------------------------------- the choice


def _shares(gpus: Sequence[int], workers: int) -> Iterator[Gpus]:
    """Yield an equal share of the GPUs for each worker."""
    size = max(1, len(gpus) // max(1, workers))
    for worker in range(workers):
        yield tuple(gpus[(worker * size + i) % len(gpus)] for i in range(size))


def _variables(group: Gpus) -> dict[str, str]:
    """Return the environment variables of a process that sees these of this process's GPUs."""
    if not group:
        return {}
    names = _names(max(group) + 1)
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(names[gpu] for gpu in group)}
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        return chosen  # its numbers follow the user's CUDA order
    return chosen | {"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}  # as nvidia-smi


def gpus_seen(variables: Mapping[str, str], count: int) -> Gpus:
    """Return the GPUs visible with these environment variables, as numbers of this process.

    Args:
        count: number of GPUs that this process sees.
    """
    shown = variables.get("CUDA_VISIBLE_DEVICES")
    if shown is None:
        return tuple(range(count))
    return tuple(map(_names(count).index, shown.split(",")))


def _names(count: int) -> list[str]:
    """Return the names by which ``CUDA_VISIBLE_DEVICES`` shows this process's GPUs, if they are ``count``."""
    here = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in here.split(",")] if here else [str(gpu) for gpu in range(count)]


def _summary(trains: Gpus, chosen: Mapping[str, Sequence[Gpus]]) -> str:
    parts = [f"trainer {trains[0]}"] if trains else []
    for key, groups in chosen.items():
        if any(groups):
            parts.append(f"{key} " + ", ".join("+".join(map(str, group)) for group in groups))
    return "GPUs: " + "; ".join(parts) if parts else ""
