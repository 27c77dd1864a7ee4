"""The trainer ``ray``: the ranks of the trainer ``torch`` in Ray workers, on one or several machines.

    the trainer torch -> RayRank   -- call -->   RankWorker, an actor   ->   Child: the process of a rank
                                                                            |
                                              the other ranks   <-- torch.distributed, weights by collective

The actor starts the same child process as without Ray and forwards calls to it, so deaths, hangs and logs of
a rank are handled like on the driver's machine.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import evolve, frozen

from grpo_core import ChildDied, ConfigError, DeadlineExceeded, GrpoError, Trainer, TrainerError, TrainerSetup
from grpo_core.kit import Child, Config, PluginHost, TrainerProcess
from grpo_plugin_ray.cluster import PluginRequirement, answer_of, load, where
from grpo_plugin_ray.placement import NO_GPU, named_gpus

GRACE = 15.0
"""Seconds for an actor to kill a late rank and report it."""
GOODBYE = 5.0
"""Seconds for an actor to end its rank; then Ray kills both."""


@frozen(kw_only=True)
class RankPlace:
    """The location of a rank."""

    who: str
    """The rank with its machine and process, for messages."""
    address: str
    """Address of its machine in the cluster."""
    port: int
    """A free port of that address."""


# ---------------------------------------------------------------------------------- in the worker


class RankWorker:
    """The actor that owns the process of one rank.

    Args:
        name: name of the rank in messages ("trainer rank 3").
        origin: versions of the driver's software.
        directory: working directory of the driver, for relative paths.
    """

    def __init__(self, name: str, origin: PluginRequirement, directory: str) -> None:
        self._who = f"{name} ({where()})"
        self._origin, self._directory = origin, directory
        self._child: Child | None = None
        self._begun = asyncio.Event()

    async def place(self) -> RankPlace:
        """Return the location.  Raises PluginError if the software differs from the driver's."""
        self._origin.check(self._who)
        address: str = load().util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family) as probe:
            port: int = probe.getsockname()[1]
        return RankPlace(who=self._who, address=address, port=port)

    async def start(self, target: str, setup: TrainerSetup, seconds: float) -> Any:
        """Start the rank and wait for it; raises like ``Child.started``."""
        _prepare_files(self._who, self._directory, setup)
        variables = {**_interfaces(setup.transport_options["host"]), **setup.env_vars}
        log = Path(setup.log).with_stem(f"trainer-{setup.rank}") if setup.log else None
        self._child = Child(target, {"setup": setup}, name=self._who, environ=variables, log=log)
        self._begun.set()
        return await self._child.started(seconds=seconds)

    async def call(self, method: str, args: tuple[Any, ...], seconds: float | None) -> Any:
        assert self._child is not None
        return await self._child.call(method, *args, seconds=seconds)

    async def died(self) -> GrpoError:
        """Wait for the death of the rank, and return the reason."""
        await self._begun.wait()
        assert self._child is not None
        return await self._child.died()

    async def aclose(self) -> None:
        if self._child is not None:
            await self._child.aclose()


def _prepare_files(who: str, directory: str, setup: TrainerSetup) -> None:
    """Change to the driver's working directory, if it exists here.

    Raises ConfigError if the directory of the run, or the model, is not on this machine.
    """
    if os.path.isdir(directory):
        os.chdir(directory)
    needed = [Path(setup.log).parent if setup.log else None, setup.resume_from]
    needed += [] if setup.prepare else [setup.model.path]
    for path in (Path(path) for path in needed if path):
        if not path.exists():
            raise ConfigError(
                f"{who}: there is no {path.absolute()} on this machine; the run's directory (--output) and "
                "the model must be on a file system that all machines share, under the same path"
            )


def _interfaces(address: str) -> dict[str, str]:
    """Return environment variables that make gloo and NCCL use the interface of this address.

    Variables that the user has set on the machine take precedence.
    """
    interface = interface_of(address)
    names = [f"{library}_SOCKET_IFNAME" for library in ("GLOO", "NCCL")]
    return {name: interface for name in names if interface and name not in os.environ}


def interface_of(address: str) -> str:
    """Return the name of the network interface with an IPv4 address; empty if unknown."""
    if sys.platform != "linux":
        return ""
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR of Linux
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # without an IPv4 address
                reply = fcntl.ioctl(probe, get_address, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(reply[20:24]) == address:
                    return name
    return "lo" if address.startswith("127.") else ""


# ---------------------------------------------------------------------------------- on the driver's side


class RayRank(TrainerProcess):
    """The process of a rank in a Ray worker, which starts when the address of the first rank is known.

    Args:
        name: name in messages ("trainer rank 3").
        setup: setup of the rank.
        target: factory of the trainer in its process, as ``module:function``.
        resources: options of the Ray actor.
        room: reservation of all ranks.
    """

    def __init__(
        self, name: str, setup: TrainerSetup, target: str, resources: Mapping[str, Any], room: Room
    ) -> None:
        self.name, self._setup, self._target, self._room = name, setup, target, room
        actor: Any = load().remote(RankWorker)
        origin = PluginRequirement.software("torch", "transformers")
        self._worker = actor.options(max_restarts=0, **resources).remote(name, origin, os.getcwd())
        self._death: GrpoError | None = None
        self._dies: Any = None

    async def started(self, *, seconds: float) -> Any:
        await self._room.ready()
        place: RankPlace = await self._answer(self._worker.place.remote(), self._room.seconds, "place")
        self.name = place.who
        rendezvous = await self._room.rendezvous(self._setup.rank, place)
        options = {**self._setup.transport_options, "host": place.address}
        setup = evolve(self._setup, transport_options=options, rendezvous=rendezvous)
        begun = self._worker.start.remote(self._target, setup, seconds)
        return await self._answer(begun, seconds, "start")

    async def call(self, method: str, *args: Any, seconds: float | None) -> Any:
        return await self._answer(self._worker.call.remote(method, args, seconds), seconds, method)

    async def died(self) -> GrpoError:
        if self._dies is None:
            self._dies = self._worker.died.remote()
        try:
            reason: GrpoError = await answer_of(self._dies, who=self.name)
        except ChildDied as error:
            reason = self._death or error
        return reason

    def kill(self, why: GrpoError | None = None) -> None:
        self._death = self._death or why or ChildDied(f"{self.name} was stopped")
        load().kill(self._worker)

    async def aclose(self) -> None:
        if self._death is None:
            with contextlib.suppress(TimeoutError, load().exceptions.RayError):
                await asyncio.wait_for(self._worker.aclose.remote(), GOODBYE)
        self.kill(ChildDied(f"{self.name} is closed"))
        self._room.close()

    async def _answer(self, reference: Awaitable[Any], seconds: float | None, method: str) -> Any:
        """Return an answer of the actor; raises the rank's error, ChildDied or DeadlineExceeded."""
        if self._death is not None:
            raise self._death
        try:
            async with asyncio.timeout(None if seconds is None else seconds + GRACE) as limit:
                # disk errors stay OSError, which the trainer handles
                return await answer_of(reference, who=self.name, kept=Exception)
        except ChildDied as error:
            raise self._death or error from error.__cause__
        except TimeoutError:
            if not limit.expired():  # a timeout inside of the rank
                raise
            late = DeadlineExceeded(f"{self.name}: no answer to {method!r} within {seconds:g} s; killed")
            self.kill(late)
            raise late from None


class Room:
    """The resources of all ranks in the cluster, and the rendezvous address of the first rank.

    Args:
        spread: whether to use as many machines as possible, instead of as few as possible.
        seconds: time limit for the resources, and then for the start of the workers.
        gpu: whether each rank gets a GPU.
    """

    def __init__(self, *, spread: bool, seconds: float, gpu: bool) -> None:
        self.seconds, self._spread = seconds, spread
        self._each = {"CPU": 1, **({"GPU": 1} if gpu else {})}
        self._group: Any = None
        self._size = self._closed = 0
        self._first: asyncio.Future[str] | None = None

    def start(self, target: str, setup: TrainerSetup, name: str) -> RayRank:
        """Start the worker of a rank; see ``ProcessTrainer.in_child``."""
        ray = load()
        if self._group is None:
            self._size = setup.ranks
            self._group = ray.util.placement_group(
                [self._each] * self._size, strategy="SPREAD" if self._spread else "PACK"
            )
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            self._group, placement_group_bundle_index=setup.rank
        )
        resources = {
            "num_cpus": 1,
            "num_gpus": self._each.get("GPU", 0),
            "scheduling_strategy": strategy,
        }
        return RayRank(name, setup, target, resources, self)

    async def ready(self) -> None:
        """Wait until the cluster has resources for all ranks.  Raises TrainerError."""
        try:
            await asyncio.wait_for(self._group.ready(), self.seconds)
        except TimeoutError:
            raise TrainerError(
                f"trainer.ranks = {self._size}: the cluster has had no room for them within "
                f"{self.seconds:g} s (trainer.options.start_deadline); each needs {self._each}, "
                f"and {load().available_resources()} is free"
            ) from None

    async def rendezvous(self, rank: int, place: RankPlace) -> str:
        """Return the rendezvous: address and port of the first rank; empty for a single rank."""
        if self._first is None:
            self._first = asyncio.get_running_loop().create_future()
        if rank == 0:
            host = f"[{place.address}]" if ":" in place.address else place.address
            self._first.set_result(f"tcp://{host}:{place.port}" if self._size > 1 else "")
        return await asyncio.shield(self._first)

    def close(self) -> None:
        """Release the resources when the last rank is closed."""
        self._closed += 1
        if self._closed == self._size:
            load().util.remove_placement_group(self._group)


def ray_trainer(setup: TrainerSetup, *, spread: bool = False, start_deadline: float = 300.0) -> Trainer:
    """Create the trainer ``torch`` with each of its processes in a Ray worker.

    Each rank with a GPU gets one from Ray.  Weights go from each rank to the engines (``collective``).

    Args:
        setup: setup of the trainer.
        spread: whether to use as many machines as possible, instead of as few as possible.
        start_deadline: time limit in seconds for resources, and then for the start of the workers.

    Raises ConfigError if the run does not use a Ray cluster.
    """
    ray = load()
    if not ray.is_initialized():
        raise ConfigError('trainer.name = "ray" trains in a Ray cluster: add --ray')
    gpu = setup.trainer.device != "cpu" and ray.cluster_resources().get("GPU", 0) > 0
    room = Room(spread=spread, seconds=start_deadline, gpu=gpu)
    if not gpu:
        setup = evolve(setup, env_vars={**NO_GPU, **setup.env_vars})
    torch: Callable[..., Trainer] = PluginHost.current().factory("trainer", "torch")
    return torch(setup, room.start)


def ranks(config: Config, host: PluginHost) -> int:
    """Return the number of processes, as for the trainer ``torch``."""
    torch = host.find("trainer", "torch")
    return torch.loaded(torch.offer.workers)(config, host) if torch.offer.workers else 1


def check(*, config: Config, host: PluginHost, **options: object) -> None:
    """Raise ConfigError for keys that name GPUs, and for keys that the trainer ``torch`` refuses."""
    if given := named_gpus(config.trainer):
        raise ConfigError(f"trainer.{given}: Ray chooses the GPUs of the ranks; leave it out")
    host.check_values("trainer", "torch", {}, config=config, host=host)
