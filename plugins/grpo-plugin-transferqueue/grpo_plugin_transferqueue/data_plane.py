"""The data plane ``transferqueue``: tokens of finished rollouts in the storage units of TransferQueue.

    the run's process   -- put: rows -->   storage units   -- get, by each rank -->   trainer
                        -- which rows -->    controller    <-- where they are --

Each segment, and each prompt, is a row with its bytes in one column.  The controller and the units are actors
that end with the run's process, so nothing is left behind.  Clients connect by sockets, without Ray.
"""

from __future__ import annotations

import asyncio
import importlib
import uuid
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from attrs import frozen

from grpo_core import ConfigError, DataPlaneError
from grpo_core.kit import Placement, RemotePlane
from grpo_plugin_transferqueue import INSTALL
from grpo_plugin_transferqueue.servers import (
    DEADLINE,
    ENVIRON,
    Line,
    Server,
    Servers,
    brief,
    hang_up,
    line,
    load,
)


@frozen(kw_only=True)
class TransferQueueReader:
    """Reads the plane in any process of the run; connects on first use."""

    servers: Servers
    partition: str

    def fetch(self, places: Sequence[tuple[str, int]]) -> list[bytes]:
        import torch

        threads = torch.get_num_threads()
        try:
            return line(self.servers).get(self.partition, [_row(key, part) for key, part in places])
        finally:
            torch.set_num_threads(threads)  # TransferQueue changes it during import


class TransferQueuePlane(RemotePlane):
    """A data plane in storage units of TransferQueue in the run's Ray cluster.

    Args:
        placement: the run's placement, which must be ``ray``.
        units: number of storage processes, spread over the machines; a further process is the controller.
    """

    def __init__(self, placement: Placement, *, units: int = 1) -> None:
        address = getattr(placement, "address", None)
        if not isinstance(address, str):
            raise ConfigError('data_plane.name = "transferqueue" needs a Ray cluster: add --ray')
        if address.startswith("ray://"):
            raise ConfigError(
                f'data_plane.name = "transferqueue" cannot be used with --ray {address}, through which only '
                "one process reaches the cluster; start the run on a machine of the cluster, with --ray auto"
            )
        if units < 1:
            raise ConfigError(f"data_plane.options.units = {units}: expected at least 1")
        super().__init__()
        self._units = units
        self._partition = uuid.uuid4().hex
        self._actors: list[Any] = []
        self._line: Line | None = None
        self._kept: dict[str, tuple[int, asyncio.Task[None]]] = {}
        self._clearing: set[asyncio.Task[None]] = set()

    async def started(self) -> None:
        await asyncio.to_thread(load)
        self._actors = _actors(self._units)
        servers = await self._servers()
        self.reader = TransferQueueReader(servers=servers, partition=self._partition)
        self._line = await asyncio.to_thread(line, servers)

    async def keep(self, key: str, step: int, parts: Sequence[bytes]) -> None:
        if not parts:
            return
        rows = [_row(key, part) for part in range(len(parts))]
        putting = asyncio.create_task(self._call("put", rows, parts))
        putting.add_done_callback(_heard)
        self._kept[key] = len(parts), putting
        await asyncio.shield(putting)  # the thread cannot be cancelled; discard waits for its end

    def discard(self, keys: Sequence[str]) -> None:
        clearing = asyncio.create_task(self._clear(keys))
        self._clearing.add(clearing)
        clearing.add_done_callback(self._clearing.discard)

    async def forget(self) -> None:
        for task in self._clearing:
            task.cancel()
        if self._line is not None:
            self._line.refuse()  # ends waiting threads
            await asyncio.to_thread(hang_up, self._line.servers)
        for actor in self._actors:
            importlib.import_module("ray").kill(actor)

    async def _clear(self, keys: Sequence[str]) -> None:
        kept = {key: self._kept.pop(key) for key in keys if key in self._kept}
        if kept:
            await asyncio.wait([putting for _, putting in kept.values()])
            rows = [_row(key, part) for key, (number, _) in kept.items() for part in range(number)]
            with suppress(DataPlaneError):  # the next call raises as well
                await self._call("clear", rows)

    async def _call(self, method: str, *args: Any) -> None:
        await asyncio.to_thread(getattr(self._line, method), self._partition, *args)

    async def _servers(self) -> Servers:
        """Wait for the actors.  Raises DataPlaneError."""
        servers = [actor.get_zmq_server_info.remote() for actor in self._actors]
        try:
            controller, *units = [Server.of(await asyncio.wait_for(each, DEADLINE)) for each in servers]
        except Exception as error:  # Ray's errors, and any error of TransferQueue
            raise DataPlaneError(
                f"data plane transferqueue: TransferQueue does not start in the cluster ({brief(error)}); "
                f"install it on each of its machines: {INSTALL}"
            ) from error
        return Servers(controller=controller, units=tuple(units))


def _heard(putting: asyncio.Task[None]) -> None:
    """Retrieve the error of an abandoned call, to avoid asyncio's warning."""
    if not putting.cancelled():
        putting.exception()


def _row(key: str, part: int) -> str:
    """Return the key of a row."""
    return f"{key}/{part}"


def _actors(units: int) -> list[Any]:
    """Start a controller and units that end with this process.

    ``transfer_queue.init`` is not used, because it reserves a core for each and gives the controller a fixed
    name, of which a cluster can have one only.
    """
    from transfer_queue.controller import TransferQueueController
    from transfer_queue.storage import SimpleStorageUnit

    options = {"num_cpus": 0, "max_restarts": 0, "runtime_env": {"env_vars": ENVIRON}}
    controller: Any = TransferQueueController
    unit: Any = SimpleStorageUnit
    spread = unit.options(**options, scheduling_strategy="SPREAD")
    return [
        controller.options(**options).remote(),
        *(spread.remote({"num_data_storage_units": units}) for _ in range(units)),
    ]
