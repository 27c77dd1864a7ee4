"""Placements of engines and environments, the default one, and its choice of GPUs.

The default places them in child processes of this machine, one for each section of engines.  A process sees
GPUs by its environment variable ``CUDA_VISIBLE_DEVICES``.  GPU numbers count the GPUs visible to grpo-core,
which may be fewer than the machine has.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from attrs import evolve, field, frozen

from grpo_core.config import EngineConfig, TrainerConfig
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.protocols import Engine
from grpo_core.contracts.records import EngineSetup
from grpo_core.engines.wrapped import LimitedEngine
from grpo_core.environments.pool import EnvironmentWorker
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.loop.agreement import Tolerance
from grpo_core.plugins.host import PluginHost

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
    summary: str = ""
    """The choice in words, for the user; empty if there was none."""


class Placement(Protocol):
    """A place where engines and environments run; the core decides their number and their work."""

    pooled: bool
    """Whether workers can be lost with their machine, so that all of them are known at the start."""
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

    def engine(
        self,
        config: EngineConfig,
        setup: EngineSetup,
        env_vars: Sequence[Mapping[str, str]],
        tolerance: Tolerance,
    ) -> Engine:
        """Make the engine of a section, or the pool of its ``workers``, not yet started.

        Args:
            config: section of the engine.
            setup: setup of a single engine; the members of a pool share its threads.
            env_vars: environment variables of each worker.
            tolerance: of a pool's canaries.
        """

    def environment(self, number: int, spec: EnvironmentSpec) -> EnvironmentWorker:
        """Make the environment worker with this number, not yet started."""


class LocalPlacement:
    """A ``Placement`` in child processes of this machine, with one engine for each section.

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
        return self.choose(trainer, engines, visible(), ranks)

    def choose(
        self, trainer: TrainerConfig | None, engines: Mapping[str, EngineConfig], count: int, ranks: int = 1
    ) -> Devices:
        """Assign ``count`` GPUs as they are configured, or by this rule.

        The trainer gets the first GPUs that no engine names; an engine that names none gets all others.

        Raises ConfigError if configured GPUs do not exist, have the wrong number, or collide.
        """
        if trainer is not None:
            check_trainer(trainer, count, ranks)
        named = {key: self.groups(key, engine, count) for key, engine in engines.items()}
        if not count:
            return Devices()
        used = {gpu for groups in named.values() for group in groups or () for gpu in group}
        own = () if trainer is None else named_gpus(trainer.gpus, trainer.device)
        trains = self.free(engines, used, count, ranks) if own is None else own
        others = tuple(gpu for gpu in range(count) if gpu not in trains) or trains
        rest = tuple(gpu for gpu in others if gpu not in used) or others
        shares = self.shares(rest, sum(engines[key].workers for key, own in named.items() if own is None))
        chosen: dict[str, Sequence[Gpus]] = {}
        for key, engine in engines.items():
            groups = named[key] or [next(shares) for _ in range(engine.workers)]
            chosen[key] = self.visible_to(key, engine, groups, trains)
        firsts = {key: {gpu for group in groups for gpu in group[:1]} for key, groups in chosen.items()}
        shared = frozenset(key for key, gpus in firsts.items() if not gpus.isdisjoint(trains))
        if count == 1:
            return Devices(shared=shared)
        return Devices(
            trainer=_variables(trains, trainer.gpus, trainer.device) if trainer else {},
            engines={
                key: [_variables(group, each.gpus, each.options.get("device")) for group in chosen[key]]
                for key, each in engines.items()
            },
            shared=shared,
            summary=_summary(trains, chosen),
        )

    def groups(self, key: str, engine: EngineConfig, count: int) -> Sequence[Gpus] | None:
        """Return the GPUs of each worker that a section names; None if it names none."""
        check_list(f"{key}.gpus", engine.gpus, count)
        gpus = named_gpus(engine.gpus, engine.options.get("device"))
        return None if gpus is None else [gpus]

    def free(self, engines: Mapping[str, EngineConfig], used: set[int], count: int, ranks: int) -> Gpus:
        """Return the GPUs of a trainer that names none: the first that no engine names."""
        free = [gpu for gpu in range(count) if gpu not in used]
        if not free and count > 1 and any(engine.gpus for engine in engines.values()):
            raise ConfigError(
                f"the engines use all {count} GPUs of this machine: leave one for the trainer, or name the "
                "trainer's in trainer.gpus"
            )
        return tuple(free[:ranks]) or (0,)

    def shares(self, gpus: Gpus, workers: int) -> Iterator[Gpus]:
        """Return the GPUs of each of the ``workers`` whose sections name none."""
        return itertools.repeat(gpus, workers)

    def visible_to(
        self, key: str, engine: EngineConfig, groups: Sequence[Gpus], trains: Gpus
    ) -> Sequence[Gpus]:
        """Return the GPUs that the workers of an engine see; each computes on its first ones.

        Raises ConfigError for an engine on the trainer's GPU, unless the sharing is clearly intended.
        """
        if {*engine.gpus} & {*trains} and {*engine.gpus} != {*trains}:
            raise ConfigError(
                f"{key}.gpus = {engine.gpus}: GPU {trains[0]} is the trainer's; leave it out there, or name "
                "another one in trainer.gpus. They share a GPU only if neither has another one"
            )
        return groups

    def engine(
        self,
        config: EngineConfig,
        setup: EngineSetup,
        env_vars: Sequence[Mapping[str, str]],
        tolerance: Tolerance,
    ) -> Engine:
        if setup.log_directory:
            Path(setup.log_directory).mkdir(parents=True, exist_ok=True)
        setup = evolve(setup, env_vars=env_vars[0])
        engine: Engine = self._plugins.make("engine", config.name, setup, **config.options)
        return LimitedEngine(engine, config.max_requests) if config.max_requests else engine

    def environment(self, number: int, spec: EnvironmentSpec) -> EnvironmentWorker:
        host = self._plugins if self._plugins.of_program(spec.env) else None
        return EnvironmentProcess(spec, plugins=self._plugins.selection, host=host)


# ---------------------------------------------------------------------------------- GPUs


def visible() -> int:
    """Return the number of GPUs that this process sees."""
    if not any(Path(path).exists() for path in DRIVERS):
        return 0  # importing torch takes a second
    import torch

    return torch.cuda.device_count()


def named_gpus(gpus: Sequence[int] | None, device: object) -> Gpus | None:
    """Return the GPUs that a section names, none for "cpu"; None if it leaves the choice to us."""
    if gpus or device == "cpu":
        return tuple(gpus or ())
    found = re.fullmatch(r"cuda:(\d+)", device) if isinstance(device, str) else None
    return (int(found[1]),) if found else None


def check_trainer(trainer: TrainerConfig, count: int, ranks: int) -> None:
    """Raise ConfigError if the trainer's keys contradict each other or the machine."""
    device, gpus = trainer.device, trainer.gpus
    if ranks > 1 and device.startswith("cuda:"):
        raise ConfigError(
            f'trainer.device = "{device}" is one GPU for {ranks} ranks (trainer.ranks); use "cuda", and name '
            "their GPUs in trainer.gpus"
        )
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
    check_list("trainer.gpus", gpus or (), count)


def check_list(key: str, gpus: Sequence[int], count: int) -> None:
    """Raise ConfigError for a GPU that is named twice, or is not there."""
    if twice := [gpu for gpu, times in Counter(gpus).items() if times > 1]:
        raise ConfigError(f"{key} = {list(gpus)}: GPU {twice[0]} is named twice")
    if absent := [gpu for gpu in gpus if not 0 <= gpu < count]:
        here = f"{count}, numbered from 0 to {count - 1}" if count else "none that torch can use"
        raise ConfigError(f"{key} = {list(gpus)}: this machine has no GPU {absent[0]}; it has {here}")


def _summary(trains: Gpus, chosen: Mapping[str, Sequence[Gpus]]) -> str:
    """Return the choice in words; empty if no process has a GPU."""
    said = [f"trainer {trains[0]}"] if trains else []
    for key, groups in chosen.items():
        if any(groups):
            said.append(f"{key} " + ", ".join("+".join(map(str, group)) for group in groups))
    return "GPUs: " + "; ".join(said) if said else ""


def _variables(group: Gpus, gpus: Sequence[int] | None, device: object) -> dict[str, str]:
    """Return the environment variables of a process that sees these of this process's GPUs.

    Args:
        gpus, device: as the section names them, as in ``named_gpus``.
    """
    if not group or (not gpus and str(device).startswith("cuda:")):  # its number counts all GPUs
        return {}
    known = names(max(group) + 1)
    chosen = {"CUDA_VISIBLE_DEVICES": ",".join(known[gpu] for gpu in group)}
    if os.environ.get("CUDA_VISIBLE_DEVICES"):
        return chosen  # its numbers follow the user's CUDA order
    return chosen | {"CUDA_DEVICE_ORDER": os.environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")}  # as nvidia-smi


def names(count: int) -> list[str]:
    """Return the names by which ``CUDA_VISIBLE_DEVICES`` shows this process's GPUs, if they are ``count``."""
    here = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [name.strip() for name in here.split(",")] if here else [str(gpu) for gpu in range(count)]
