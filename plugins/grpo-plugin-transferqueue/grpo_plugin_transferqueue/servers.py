"""Clients of TransferQueue's processes whose calls end when a process is dead.

TransferQueue's clients wait for minutes, or forever, for a killed process.
"""

from __future__ import annotations

import asyncio
import atexit
import functools
import importlib
import os
import socket
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import wait
from typing import Any, TypeVar

from attrs import frozen

from grpo_core import ConfigError, DataPlaneError
from grpo_plugin_transferqueue import INSTALL

T = TypeVar("T")

ENVIRON = {"TQ_NUM_THREADS": "1"}
"""Environment variables of processes and clients, to avoid a warning about threads in every call."""
FIELD = "contents"
"""Name of the column."""
DEADLINE = 60.0
"""Time limit of a call in seconds."""
PULSE = 1.0
"""Interval in seconds of checks for dead processes during a call."""
REACH = 5.0
"""Time limit in seconds for connecting to a process, and for the end of a thread."""


@frozen
class Server:
    """The address of a process; picklable without TransferQueue."""

    name: str
    ip: str
    ports: tuple[tuple[str, int], ...]

    @classmethod
    def of(cls, info: Any) -> Server:
        """Convert a ``ZMQServerInfo``."""
        return cls(str(info.id), str(info.ip), tuple(sorted(info.ports.items())))


@frozen(kw_only=True)
class Servers:
    """The processes of one run."""

    controller: Server
    """The process that maps rows to units."""
    units: tuple[Server, ...]
    """The processes that store rows."""

    def reach(self) -> None:
        """Connect to each process.  Raises DataPlaneError if one is gone."""
        for server in (self.controller, *self.units):
            for _, port in server.ports:
                try:
                    socket.create_connection((server.ip, port), timeout=REACH).close()
                except OSError as error:
                    raise lost(f"{server.name} at {server.ip}:{port} is gone ({error})") from error


class Line:
    """A thread-safe client of TransferQueue with blocking methods."""

    def __init__(self, servers: Servers) -> None:
        load()
        servers.reach()
        self.servers = servers
        self._closed = False
        self._client = _client(servers)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="transferqueue", daemon=True)
        self._thread.start()

    def put(self, partition: str, keys: Sequence[str], parts: Sequence[bytes]) -> None:
        """Store each part as a row under its key."""
        self._run(self._put(partition, list(keys), parts))

    def get(self, partition: str, keys: Sequence[str]) -> list[bytes]:
        """Return the parts with these keys."""
        return self._run(self._get(partition, list(keys)))

    def clear(self, partition: str, keys: Sequence[str]) -> None:
        """Remove rows; missing keys are ignored."""
        self._run(self._clear(partition, list(keys)))

    def refuse(self) -> None:
        """Fail all waiting and later calls promptly."""
        self._closed = True

    def close(self) -> None:
        """Close the client."""
        self.refuse()
        ended = asyncio.run_coroutine_threadsafe(_end_others(), self._loop)
        wait([ended], REACH)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(REACH)
        self._client.close()
        if not self._thread.is_alive():
            self._loop.close()

    def _run(self, request: Coroutine[Any, Any, T]) -> T:
        """Run a request of the client.  Raises DataPlaneError."""
        if self._closed:
            request.close()
            raise lost("the plane is closed")
        answer = asyncio.run_coroutine_threadsafe(request, self._loop)
        end = time.monotonic() + DEADLINE
        try:
            while not wait([answer], PULSE).done:
                if self._closed:
                    raise lost("the plane is closed")
                self.servers.reach()
                if time.monotonic() > end:
                    raise lost(f"no answer in {DEADLINE:g} s")
            return answer.result()
        except DataPlaneError:
            raise
        except Exception as error:
            raise lost(error) from error
        finally:
            answer.cancel()

    async def _put(self, partition: str, keys: list[str], parts: Sequence[bytes]) -> None:
        from tensordict import NonTensorStack, TensorDict

        rows = await self._client.async_kv_retrieve_meta(keys=keys, partition_id=partition, create=True)
        fields = TensorDict({FIELD: NonTensorStack(*parts)}, batch_size=[len(parts)])
        await self._client.async_put(fields, rows)

    async def _get(self, partition: str, keys: list[str]) -> list[bytes]:
        each = list(dict.fromkeys(keys))
        rows = await self._client.async_kv_retrieve_meta(keys=each, partition_id=partition, create=False)
        if rows.size != len(each) or FIELD not in rows.field_names:
            raise lost(f"the controller knows {rows.size} of {len(each)} rows")
        found = await self._client.async_get_data(rows)
        contents = dict(zip(each, found.get(FIELD).tolist(), strict=True))
        return [contents[key] for key in keys]

    async def _clear(self, partition: str, keys: list[str]) -> None:
        rows = await self._client.async_kv_retrieve_meta(keys=keys, partition_id=partition, create=False)
        if rows.size:
            await self._client.async_clear_samples(rows)


def _client(servers: Servers) -> Any:
    """Connect a client of the library."""
    from transfer_queue.client import AsyncTransferQueueClient
    from transfer_queue.utils.enum_utils import Role
    from transfer_queue.utils.zmq_utils import ZMQServerInfo

    def info(role: Any, server: Server) -> Any:
        return ZMQServerInfo(role=role, id=server.name, ip=server.ip, ports=dict(server.ports))

    client = AsyncTransferQueueClient(
        client_id=f"grpo-core-{os.getpid()}",
        controller_info=info(Role.CONTROLLER, servers.controller),
        zmq_io_threads=1,
    )
    units = {unit.name: info(Role.STORAGE, unit) for unit in servers.units}
    try:
        client.initialize_storage_manager("SimpleStorage", {"zmq_info": units})
    except Exception as error:  # for example no answer from the controller
        client.close()
        raise lost(error) from error
    return client


async def _end_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


# ---------------------------------------------------------------------------------- one line for each process

_lines: dict[Servers, Line] = {}
_lock = threading.Lock()


def line(servers: Servers) -> Line:
    """Return this process's client of these servers.  Raises DataPlaneError if they are gone."""
    with _lock:
        if servers not in _lines:
            _lines[servers] = Line(servers)
            # the library's threads must stop before the interpreter destroys their sockets
            atexit.register(functools.partial(hang_up, servers))
        return _lines[servers]


def hang_up(servers: Servers) -> None:
    """Close this process's client of these servers, if there is one."""
    with _lock:
        found = _lines.pop(servers, None)
    if found is not None:
        found.close()


def load() -> None:
    """Import TransferQueue.  Raises ConfigError if that fails."""
    for name, value in ENVIRON.items():
        os.environ.setdefault(name, value)  # read during the import
    try:
        importlib.import_module("transfer_queue")
    except ImportError as error:
        raise ConfigError(
            f'data_plane.name = "transferqueue": TransferQueue cannot be imported ({error}); {INSTALL}'
        ) from error


def lost(error: BaseException | str) -> DataPlaneError:
    why = error if isinstance(error, str) else brief(error)
    return DataPlaneError(
        f"data plane transferqueue: the tokens of finished rollouts are lost, or do not arrive: {why}"
    )


def brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"
