"""Assigns the GPUs of this machine to the trainer and the engines.

A process sees GPUs by its environment variable ``CUDA_VISIBLE_DEVICES``.  GPU numbers count the GPUs visible
to grpo-core, which may be fewer than the machine has.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from attrs import field, frozen

from grpo_core.config import EngineConfig, TrainerConfig
from grpo_core.contracts.errors import ConfigError
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.transports import find_transport

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
    if trainer is not None and trainer.device.startswith("cuda") and not count:
        raise ConfigError(
            f'trainer.device = "{trainer.device}": this process sees no GPU; set it to "auto" or "cpu", '
            "or fix the driver (grpo-core doctor)"
        )
    for key, gpus in _configured(trainer, engines, ranks):
        _check_list(key, gpus, count)
    given = {key: _given_groups(key, engine) for key, engine in engines.items()}
    if not count:
        return Devices()
    used = {gpu for groups in given.values() for group in groups or () for gpu in group}
    trains = _of_trainer(trainer, engines, used, count, joined, ranks)
    rest = [gpu for gpu in range(count) if gpu not in used and gpu not in trains]
    rest = rest or [gpu for gpu in range(count) if gpu not in trains] or [*trains]
    shares = _shares(rest, sum(engines[key].workers for key, groups in given.items() if groups is None))
    chosen = {
        key: [next(shares) for _ in range(engines[key].workers)] if groups is None else groups
        for key, groups in given.items()
    }
    shared = set()
    for key, engine in engines.items():
        _check_overlap(key, engine, trains, joined=key in joined)
        if key in joined and trains:
            seen = rest if given[key] is None else chosen[key][0]
            chosen[key] = [(*(gpu for gpu in seen if gpu not in trains), *trains)]
        if any({*trains}.intersection(group[:1] if key in joined else group) for group in chosen[key]):
            shared.add(key)
    alone = count == 1
    return Devices(
        trainer={} if alone or (trainer and _index(trainer.device) is not None) else _variables(trains),
        engines={
            key: [{} if alone or _has_own_choice(engines[key]) else _variables(group) for group in groups]
            for key, groups in chosen.items()
        },
        shared=frozenset(shared),
        told="" if alone else _summary(trains, chosen),
    )


# ---------------------------------------------------------------------------------- what is configured


def _configured(
    trainer: TrainerConfig | None, engines: Mapping[str, EngineConfig], ranks: int
) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the lists of GPUs by key.  Raises ConfigError if the trainer's contradicts its device."""
    if trainer is not None and trainer.gpus:
        if len(trainer.gpus) != ranks:
            raise ConfigError(
                f"trainer.gpus = {trainer.gpus}: each of the {ranks} ranks (trainer.ranks) computes "
                f"on one GPU; name {ranks}"
            )
        if trainer.device not in ("auto", "cuda"):
            raise ConfigError(
                f'trainer.gpus = {trainer.gpus} and trainer.device = "{trainer.device}" exclude each other; '
                "leave one of them out"
            )
        yield "trainer.gpus", trainer.gpus
    for key, engine in engines.items():
        if engine.gpus:
            yield f"{key}.gpus", engine.gpus


def _check_list(key: str, gpus: Sequence[int], count: int) -> None:
    if twice := [gpu for gpu, times in Counter(gpus).items() if times > 1]:
        raise ConfigError(f"{key} = {list(gpus)}: GPU {twice[0]} is named twice")
    if absent := [gpu for gpu in gpus if not 0 <= gpu < count]:
        here = f"{count}, numbered from 0 to {count - 1}" if count else "none that torch can use"
        raise ConfigError(f"{key} = {list(gpus)}: this machine has no GPU {absent[0]}; it has {here}")


def _given_groups(key: str, engine: EngineConfig) -> list[Gpus] | None:
    """Return the groups that the section sets, or None."""
    if engine.gpus:
        size, left = divmod(len(engine.gpus), engine.workers)
        if left or not size:
            raise ConfigError(
                f"{key}.gpus = {engine.gpus}: {len(engine.gpus)} GPUs for {engine.workers} workers "
                f"({key}.workers); each gets the same number: name {engine.workers * (size + 1)}"
                + (f" or {engine.workers * size}" if size else "")
            )
        return [tuple(engine.gpus[i * size : (i + 1) * size]) for i in range(engine.workers)]
    if _has_own_choice(engine):
        index = _index(engine.options["device"])
        return [() if index is None else (index,)] * engine.workers
    return None


def _has_own_choice(engine: EngineConfig) -> bool:
    """Whether an option of the engine, not ``gpus``, sets its device: the CPU, or "cuda:1"."""
    device = engine.options.get("device")
    return not engine.gpus and (device == "cpu" or _index(device) is not None)


def _index(device: object) -> int | None:
    """Return the number in "cuda:1"."""
    found = re.fullmatch(r"cuda:(\d+)", device) if isinstance(device, str) else None
    return int(found[1]) if found else None


def _of_trainer(
    trainer: TrainerConfig | None,
    engines: Mapping[str, EngineConfig],
    used: set[int],
    count: int,
    joined: Collection[str],
    ranks: int,
) -> Gpus:
    if trainer is None or trainer.device == "cpu":
        return ()
    if trainer.gpus:
        return tuple(trainer.gpus)
    if (index := _index(trainer.device)) is not None:
        if ranks > 1:
            raise ConfigError(
                f'trainer.device = "{trainer.device}" is one GPU for {ranks} ranks (trainer.ranks); '
                'use "cuda", and name their GPUs in trainer.gpus'
            )
        return (index,)
    for key, engine in engines.items():
        if key in joined and engine.gpus:
            return (engine.gpus[-1],)
    free = [gpu for gpu in range(count) if gpu not in used]
    if ranks > 1:
        if len(free) < ranks:
            raise ConfigError(
                f"trainer.ranks = {ranks}: each rank needs its own GPU, and {len(free)} of the "
                f"{count} GPUs of this machine are free; lower it, or give the engines fewer"
            )
        return tuple(free[:ranks])
    if not free and count > 1 and any(engine.gpus for engine in engines.values()):
        raise ConfigError(
            f"the engines use all {count} GPUs of this machine: leave one for the trainer, or name the "
            "trainer's in trainer.gpus"
        )
    return (free[0] if free else 0,)


def _check_overlap(key: str, engine: EngineConfig, trains: Gpus, *, joined: bool) -> None:
    """Reject an engine on the trainer's GPU, unless the sharing is clearly intended."""
    gpus = {*engine.gpus}
    if not gpus or not trains:
        return
    if joined:
        if not gpus & {*trains}:
            raise ConfigError(
                f'{key}.transport = "{engine.transport}": the engine must see the trainer\'s GPU '
                f'{trains[0]}, and {key}.gpus = {engine.gpus}; name it there last, or use "shm"'
            )
    elif gpus & {*trains} and gpus != {*trains}:
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
