"""Data planes: storage for the tokens of finished groups until they are trained.

    a group ends -> not filtered -> put(group) -> ready -> rows -> a rank fetches the tokens of its rows
                                        |                    \\-> the tracker that writes rollouts does, too
                                        '-> the group that the pipeline holds has handles

A handle of tokens (``PlacedTokens``) knows their number, which of them were sampled, and by which weights;
that of a prompt (``PlacedIds``) knows its length and its digest.  A plane keeps the tokens of a group until
its last handle is gone, for any reason: the group was trained and written, the run ends, or an error drops
it.  So no part has to report the end of a step.
"""

from __future__ import annotations

import asyncio
import itertools
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, cast

from attrs import evolve

from grpo_core.contracts.errors import PluginError
from grpo_core.contracts.records import Group, Segment
from grpo_core.contracts.tokens import Ids, PlacedIds, PlacedTokens, TokenReader, contents_of, digest_of
from grpo_core.plugins.files import FILE_PREFIX


def check_reader(plane: Any, name: str) -> None:
    """Raise PluginError if a plane has a reader that the trainer's process could not import."""
    reader = vars(plane).get("reader") if isinstance(plane, RemotePlane) else None
    if type(reader).__module__.startswith(FILE_PREFIX):
        raise PluginError(
            f"data_plane.name = {name!r}: its reader {type(reader).__name__} is defined in a single file, "
            "which the trainer's process cannot import; move it into an installed package, or a module on "
            "PYTHONPATH"
        )


class MemoryPlane:
    """Keeps tokens in the process of the run: the groups hold them."""

    remote = False

    def __init__(self, placement: Any) -> None:
        """Any placement works."""

    async def started(self) -> None:
        return None

    async def put(self, group: Group) -> Group:
        return group

    async def aclose(self) -> None:
        return None


class RemotePlane(ABC):
    """Base class of planes that keep tokens outside of the run's process.

    A subclass sets ``reader``, at the latest in ``started``, and keeps bytes under a key.
    """

    remote = True

    reader: TokenReader
    """Reads the plane in any process; it is pickled."""

    def __init__(self) -> None:
        self._keys = itertools.count()
        self._released: deque[str] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @abstractmethod
    async def started(self) -> None:
        """Return when the plane can keep tokens."""

    @abstractmethod
    async def keep(self, key: str, step: int, parts: Sequence[bytes]) -> None:
        """Keep the parts, which ``reader`` finds at ``(key, 0)``, ``(key, 1)`` and so on.

        A part has ids and logprobs of a segment, or the ids of a prompt, and may be empty.
        ``step`` is the last one that may train them.  Raises DataPlaneError.
        """

    @abstractmethod
    def discard(self, keys: Sequence[str]) -> None:
        """Drop these keys, also one whose ``keep`` was cancelled.  Returns at once and raises nothing."""

    @abstractmethod
    async def forget(self) -> None:
        """Drop everything, and end the plane; no call follows."""

    async def aclose(self) -> None:
        self._closed = True
        await self.forget()

    async def put(self, group: Group) -> Group:
        self._loop = asyncio.get_running_loop()
        key = str(next(self._keys))
        lease = _Lease()
        weakref.finalize(lease, self._release, key).atexit = False
        segments = [segment for rollout in group.rollouts for segment in rollout.segments]
        digests = [digest_of(segment.prompt_ids) for segment in segments]
        prompts = {digest: each.prompt_ids for digest, each in zip(digests, segments, strict=True)}
        contents = [contents_of(segment.tokens) for segment in segments]
        contents += [ids.tobytes() for ids in prompts.values()]
        await self.keep(key, group.target_version, contents)
        places = ((key, number) for number in itertools.count())
        tokens = [PlacedTokens.of(each.tokens, self.reader, next(places), lease) for each in segments]
        ids = {
            digest: PlacedIds(self.reader, next(places), len(ids), digest, lease)
            for digest, ids in prompts.items()
        }
        placed = iter(
            Segment(prompt_ids=cast(Ids, ids[digest]), tokens=its)
            for digest, its in zip(digests, tokens, strict=True)
        )
        return evolve(
            group,
            rollouts=tuple(
                evolve(rollout, segments=tuple(itertools.islice(placed, len(rollout.segments))))
                for rollout in group.rollouts
            ),
        )

    def _release(self, key: str) -> None:
        """Called on any thread when the last handle is gone."""
        self._released.append(key)
        if self._loop is not None and not self._closed:
            with suppress(RuntimeError):  # the loop is closed: so is the plane
                self._loop.call_soon_threadsafe(self._discard_released)

    def _discard_released(self) -> None:
        keys = [self._released.popleft() for _ in range(len(self._released))]
        if keys and not self._closed:
            self.discard(keys)


class _Lease:
    """Lives as long as one of the handles that hold it."""
