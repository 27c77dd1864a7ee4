"""The data plane ``ray``: tokens of finished rollouts in Ray's object store.

    the run's process   -- put -->   object store   -- get, by each rank -->   trainer
                        -- keep: where they are -->   TokenStore   <-- find --

The store is an actor that holds references but no tokens.  Objects live as long as the store holds them, and
the store ends with the run's process, so nothing is left behind.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import Any

from attrs import field, frozen

from grpo_core import ConfigError, DataPlaneError
from grpo_core.kit import Placement, RemotePlane
from grpo_plugin_ray.cluster import brief, load
from grpo_plugin_ray.placement import RayPlacement

NAMESPACE = "grpo-core"
"""Ray namespace of the named store."""
ENOUGH = 64 * 1024
"""Target size of an object in bytes: short rollouts share objects, and a rank reads at most this much in
excess of its rollouts."""
DEADLINE = 60.0
"""Time limit in seconds for the store, and for an object."""


class TokenStore:
    """The actor that maps each key to the objects with its parts."""

    def __init__(self) -> None:
        self._held: dict[str, _Kept] = {}

    def keep(self, key: str, kept: _Kept) -> None:
        self._held[key] = kept

    def find(self, parts: Sequence[tuple[str, int]]) -> tuple[list[Any], list[tuple[int, int]]]:
        """Return the objects with these parts, and for each part the indices of its object and within it."""
        objects: dict[tuple[str, int], int] = {}
        references: list[Any] = []
        found = []
        for key, part in parts:
            number, index = self._held[key].indices[part]
            if (key, number) not in objects:
                objects[key, number] = len(references)
                references.append(self._held[key].objects[number])
            found.append((objects[key, number], index))
        return references, found

    def discard(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._held.pop(key, None)

    def held(self) -> tuple[int, int]:
        """Return the number of stored parts and their total bytes."""
        kept = self._held.values()
        return sum(len(each.indices) for each in kept), sum(each.nbytes for each in kept)


@frozen(kw_only=True)
class _Kept:
    """The objects with the parts of a key."""

    objects: list[Any] = field(repr=False)
    """Object references."""
    indices: list[tuple[int, int]]
    """The index of each part's object, and its index within the object."""
    nbytes: int


@frozen(kw_only=True)
class RayReader:
    """Reads the plane in any process on the cluster's machines; connects on first use."""

    address: str
    name: str
    """Name of the store."""

    def fetch(self, parts: Sequence[tuple[str, int]]) -> list[Any]:
        """Return the parts as byte arrays in the machine's shared memory."""
        ray = load()
        try:
            if not ray.is_initialized():
                ray.init(
                    address=self.address, namespace=NAMESPACE, log_to_driver=False, logging_level="error"
                )
            store = ray.get_actor(self.name, NAMESPACE)
            references, found = ray.get(store.find.remote(list(parts)), timeout=DEADLINE)
            objects = ray.get(references, timeout=DEADLINE)
        except (ray.exceptions.RayError, ValueError, ConnectionError) as error:  # ValueError: no such actor
            raise lost(error) from error
        return [objects[number][index] for number, index in found]


class RayPlane(RemotePlane):
    """A data plane in Ray's object store.

    Args:
        placement: the run's placement, which must be ``ray``.
    """

    def __init__(self, placement: Placement) -> None:
        if not isinstance(placement, RayPlacement):
            raise ConfigError('data_plane.name = "ray" keeps tokens in a Ray cluster: add --ray')
        if placement.address.startswith("ray://"):
            raise ConfigError(
                f'data_plane.name = "ray" cannot be used with --ray {placement.address}, through which only '
                "one process reaches the cluster; start the run on a machine of the cluster, with --ray auto"
            )
        super().__init__()
        self._store: Any = None

    async def started(self) -> None:
        ray = load()
        name = f"tokens-{uuid.uuid4().hex}"
        actor: Any = ray.remote(TokenStore)
        self._store = actor.options(name=name, namespace=NAMESPACE, num_cpus=0, max_restarts=0).remote()
        self.reader = RayReader(address=ray.get_runtime_context().gcs_address, name=name)
        await self._answer(self._store.held.remote())

    async def keep(self, key: str, step: int, parts: Sequence[bytes]) -> None:
        try:
            kept = await asyncio.to_thread(_put, parts)
        except load().exceptions.RayError as error:  # for example a full object store or disk
            raise lost(error) from error
        await self._answer(self._store.keep.remote(key, kept))

    def discard(self, keys: Sequence[str]) -> None:
        self._store.discard.remote(list(keys))  # not awaited, so a dead actor raises nothing

    async def held(self) -> tuple[int, int]:
        """Return the number of stored parts and their total bytes."""
        number, nbytes = await self._answer(self._store.held.remote())
        return number, nbytes

    async def forget(self) -> None:
        if self._store is not None:
            load().kill(self._store)

    async def _answer(self, reference: Any) -> Any:
        try:
            return await asyncio.wait_for(reference, DEADLINE)
        except (load().exceptions.RayError, TimeoutError) as error:
            raise lost(error) from error


def _put(parts: Sequence[bytes]) -> _Kept:
    """Put parts into the object store, several in an object up to the target size."""
    import numpy as np

    objects: list[list[Any]] = []
    indices, size = [], ENOUGH
    for part in parts:
        if size >= ENOUGH:
            objects.append([])
            size = 0
        indices.append((len(objects) - 1, len(objects[-1])))
        objects[-1].append(np.frombuffer(part, np.uint8))
        size += len(part)
    put = load().put
    return _Kept(objects=[put(each) for each in objects], indices=indices, nbytes=sum(map(len, parts)))


def lost(error: BaseException) -> DataPlaneError:
    return DataPlaneError(
        f"data plane ray: the tokens of finished rollouts are lost, or do not arrive: {brief(error)}"
    )
