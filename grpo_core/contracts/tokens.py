"""Tokens as arrays: one value that completions, rollouts and rows hold, at 13 bytes a token.

Arrays are read-only, so that records can share them.  ``PlacedTokens`` and ``PlacedIds`` stand for what a
data plane keeps.  Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

import numpy as np
from attrs import field, frozen
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import ArrayLike, NDArray

from grpo_core.contracts.errors import DataPlaneError

if TYPE_CHECKING:
    from typing import TypeGuard


T = TypeVar("T")

Ids = NDArray[np.int32]
"""Token ids or versions, int32 [n], read-only."""

Runs = tuple[tuple[int, bool, int], ...]
"""Runs of tokens that are alike: their number, whether they were sampled, and the weights that did it."""

NOT_SAMPLED = -1
"""Version of a token that no weights sampled."""

_INT32, _FLOAT32, _BOOL = np.dtype(np.int32), np.dtype(np.float32), np.dtype(np.bool_)

_LIMIT = 2**31

_NOT_COUNTED = -1

_BYTES = 13
"""Bytes of a token: three times four, and one for ``sampled``."""


def as_ids(values: ArrayLike) -> Ids:
    """Return whole numbers as a read-only int32 array [n]; a read-only one is returned as it is.

    ``PlacedIds`` are returned as they are, too.  Raises ValueError if one is not a whole number of 32 bits.
    """
    if _is_shared(values, _INT32):
        return values
    return cast(Ids, values) if isinstance(values, PlacedIds) else _read_ids(values)


def _as_flags(values: ArrayLike) -> NDArray[np.bool_]:
    return values if _is_shared(values, _BOOL) else _sealed(np.array(values, _BOOL))


def _as_logprobs(values: ArrayLike) -> NDArray[np.float32]:
    return values if _is_shared(values, _FLOAT32) else _read_logprobs(values)


def concatenated(parts: Sequence[Ids]) -> Ids:
    """Join the parts in order, int32, read-only.  A single part is returned as it is."""
    return parts[0] if len(parts) == 1 else np.frombuffer(_joined(parts), _INT32)


@frozen(eq=False, repr=False)
class Tokens:
    """A sequence of n tokens.  All arrays are read-only, contiguous and equally long.

    The constructor takes any sequences; it copies all but read-only arrays of the right type.  Raises
    ValueError if they differ in length, or hold values of another kind.
    """

    ids: Ids = field(converter=as_ids)
    """Token ids."""
    sampled: NDArray[np.bool_] = field(converter=_as_flags)
    """Whether the engine sampled a token; only sampled tokens are trained."""
    logprobs: NDArray[np.float32] = field(converter=_as_logprobs)
    """Logprob of each token under the distribution that it was sampled from; 0 where not sampled."""
    versions: Ids = field(converter=as_ids)
    """Weights that sampled each token; -1 where not sampled."""
    _n_sampled: int = field(init=False, default=_NOT_COUNTED)

    def __attrs_post_init__(self) -> None:
        n = len(self.ids)
        if not n == len(self.logprobs) == len(self.versions) == len(self.sampled):
            flags = "" if len(self.sampled) == n else f", {len(self.sampled)} flags of what was sampled"
            raise ValueError(
                f"{n} token ids, {len(self.logprobs)} logprobs and {len(self.versions)} versions{flags}; "
                "expected as many of each"
            )

    @classmethod
    def empty(cls) -> Tokens:
        return _EMPTY

    @classmethod
    def generated(cls, ids: ArrayLike, logprobs: ArrayLike, versions: ArrayLike) -> Tokens:
        """Make tokens that an engine sampled."""
        sampled = as_ids(ids)
        return cls(sampled, np.frombuffer(b"\1" * len(sampled), _BOOL), logprobs, versions)

    @classmethod
    def context(cls, ids: ArrayLike) -> Tokens:
        """Make tokens that the model reads and did not sample, such as an environment's answer."""
        read = as_ids(ids)
        n = len(read)
        versions = np.array([NOT_SAMPLED], np.int32).tobytes() * n
        return _from_bytes(b"".join((read.tobytes(), bytes(4 * n), versions, bytes(n))))

    @classmethod
    def concatenate(cls, parts: Sequence[Tokens]) -> Tokens:
        """Join the parts in order.  A single part is returned as it is."""
        if len(parts) <= 1:
            return parts[0] if parts else _EMPTY
        arrays: list[NDArray[Any]] = [part.ids for part in parts]
        arrays += [part.logprobs for part in parts]
        arrays += [part.versions for part in parts]
        arrays += [part.sampled for part in parts]
        return _from_bytes(_joined(arrays))

    @property
    def n_sampled(self) -> int:
        """Number of tokens that the engine sampled."""
        if self._n_sampled == _NOT_COUNTED:  # read several times in a step
            object.__setattr__(self, "_n_sampled", int(np.count_nonzero(self.sampled)))
        return self._n_sampled

    @property
    def completions(self) -> tuple[int, ...]:
        """Number of tokens of each completion: a run of sampled tokens is one, and the last may be empty."""
        edges = np.flatnonzero(np.diff(self.sampled, prepend=False, append=False))
        lengths: list[int] = (edges[1::2] - edges[::2]).tolist()
        return tuple(lengths if self.sampled[-1:].any() else [*lengths, 0])

    @property
    def sampled_versions(self) -> Ids:
        """Weights that sampled each sampled token, int32 [n_sampled]."""
        return self.versions[self.sampled]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the four arrays by name, as safetensors takes them; ``Tokens(**arrays)`` reads them back."""
        return {
            "ids": self.ids,
            "sampled": self.sampled,
            "logprobs": self.logprobs,
            "versions": self.versions,
        }

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokens):
            return NotImplemented
        return self is other or (
            np.array_equal(self.ids, other.ids)
            and np.array_equal(self.sampled, other.sampled)
            and np.array_equal(self.logprobs, other.logprobs)
            and np.array_equal(self.versions, other.versions)
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        n = self.n_sampled
        sampled = "all" if n == len(self) else str(n)
        return (
            f"Tokens({self.ids.tolist()}, {sampled} sampled, logprobs={self.logprobs.tolist()}, "
            f"versions={self.versions.tolist()})"
        )

    def __reduce__(self) -> tuple[Callable[[bytes], Tokens], tuple[bytes]]:
        return _from_bytes, (_joined((self.ids, self.logprobs, self.versions, self.sampled)),)


class TokenReader(Protocol):
    """Reads a data plane, in any process: it travels with the handles of the tokens, as a pickle."""

    def fetch(self, places: Sequence[tuple[str, int]]) -> Sequence[Any]:
        """Return the bytes at each place: the ids of a prompt, or ids and logprobs (``contents_of``).

        A place is a key and a number, as ``grpo_core.storage.planes`` chose them.  Raises DataPlaneError.
        """
        ...


class _Handle:
    """Stands for what a data plane keeps under a place.

    Copying returns the handle itself: a copy without the lease could outlive the contents.
    """

    __slots__ = ()

    _place: tuple[str, int]
    _reader: TokenReader

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self


class PlacedIds(_Handle, NDArrayOperatorsMixin):
    """Token ids of a prompt in a data plane, which behave as an int32 array [n].

    Their number and digest are known here.  All other access fetches them, each time anew; ``fetched``
    fetches many at once.

    Args:
        reader: reads the plane.
        place: key and number under which the plane keeps them.
        n: their number.
        digest: ``digest_of`` them.
        lease: the plane keeps the ids until the last handle with this object has gone.
    """

    __slots__ = ("_lease", "_n", "_place", "_reader", "digest")
    __hash__ = None  # type: ignore[assignment]  # as an array's

    def __init__(
        self, reader: TokenReader, place: tuple[str, int], n: int, digest: bytes, lease: object = None
    ) -> None:
        self._reader, self._place, self._n, self.digest, self._lease = reader, place, n, digest, lease

    def _with(self, contents: Any) -> Ids:
        """Return the ids that the plane kept."""
        if (found := len(contents)) != 4 * self._n:
            raise DataPlaneError(
                f"the data plane returned {found} bytes of {self._n} ids; expected {4 * self._n}"
            )
        return _sealed(np.frombuffer(contents, _INT32))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NDArray[Any]:
        if copy is False:
            raise ValueError("the ids are in a data plane; an array of them is a copy")
        return np.asarray(fetched([self])[0], dtype=dtype)

    def __array_ufunc__(self, ufunc: np.ufunc, method: Any, *inputs: Any, **kwargs: Any) -> Any:
        here = [np.asarray(each) if isinstance(each, PlacedIds) else each for each in inputs]
        return getattr(ufunc, method)(*here, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # no other object's protocol is an array's
            raise AttributeError(name)
        return getattr(np.asarray(self), name)

    def __bytes__(self) -> bytes:
        return bytes(np.asarray(self))

    def __iter__(self) -> Iterator[np.int32]:
        return iter(np.asarray(self))

    def __getitem__(self, at: Any) -> Any:
        return np.asarray(self)[at]

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        return f"PlacedIds({self._place}, {self._n} ids)"

    def __reduce__(self) -> tuple[type[PlacedIds], tuple[Any, ...]]:
        return PlacedIds, (self._reader, self._place, self._n, self.digest)


class PlacedTokens(_Handle, Tokens):
    """Tokens whose ids and logprobs a data plane keeps; the memory here does not grow with their number.

    Their number, mask and versions are known here, as runs of equal tokens.  Access to ids or logprobs
    fetches them, each time anew; ``fetched`` fetches many at once.

    Args:
        reader: reads the plane.
        place: key and number under which the plane keeps them.
        runs: (length, sampled, version) of each run.
        lease: the plane keeps the tokens until the last handle with this object has gone.
    """

    __slots__ = ("_lease", "_place", "_reader", "_runs")

    _lease: object
    _place: tuple[str, int]
    _reader: TokenReader
    _runs: Runs

    def __init__(self, reader: TokenReader, place: tuple[str, int], runs: Runs, lease: object = None) -> None:
        for name, value in (("_reader", reader), ("_place", place), ("_runs", runs), ("_lease", lease)):
            object.__setattr__(self, name, value)
        object.__setattr__(self, "_n_sampled", sum(n for n, sampled, _ in runs if sampled))

    @classmethod
    def of(cls, tokens: Tokens, reader: TokenReader, place: tuple[str, int], lease: object) -> PlacedTokens:
        """Make the handle of tokens that the plane keeps at this place."""
        if not len(tokens):
            return cls(reader, place, (), lease)
        differs = (np.diff(tokens.versions) != 0) | (tokens.sampled[1:] != tokens.sampled[:-1])
        starts = np.concatenate([[0], np.flatnonzero(differs) + 1])
        lengths = np.diff(starts, append=len(tokens))
        values = lengths.tolist(), tokens.sampled[starts].tolist(), tokens.versions[starts].tolist()
        return cls(reader, place, tuple(zip(*values, strict=True)), lease)

    @property
    def ids(self) -> Ids:
        return fetched([self])[0].ids

    @property
    def logprobs(self) -> NDArray[np.float32]:
        return fetched([self])[0].logprobs

    @property
    def sampled(self) -> NDArray[np.bool_]:
        flags = [sampled for _, sampled, _ in self._runs]
        return _sealed(np.repeat(np.array(flags, _BOOL), self._lengths))

    @property
    def versions(self) -> Ids:
        values = [version for _, _, version in self._runs]
        return _sealed(np.repeat(np.array(values, _INT32), self._lengths))

    @property
    def _lengths(self) -> list[int]:
        return [n for n, _, _ in self._runs]

    def arrays(self) -> dict[str, NDArray[Any]]:
        return fetched([self])[0].arrays()

    def _with(self, contents: Any) -> Tokens:
        """Return the tokens with the contents that the plane kept."""
        n, found = len(self), len(contents)
        if found != 8 * n:
            raise DataPlaneError(f"the data plane returned {found} bytes of {n} tokens; expected {8 * n}")
        ids, logprobs = np.frombuffer(contents, _INT32, n), np.frombuffer(contents, _FLOAT32, n, 4 * n)
        return Tokens(ids, self.sampled, logprobs, self.versions)

    def __len__(self) -> int:
        return sum(self._lengths)

    def __repr__(self) -> str:
        return f"PlacedTokens({self._place}, {len(self)} tokens, {self.n_sampled} sampled)"

    def __reduce__(self) -> tuple[Callable[..., Tokens], tuple[Any, ...]]:
        return PlacedTokens, (self._reader, self._place, self._runs)


def contents_of(tokens: Tokens) -> bytes:
    """Return what a data plane keeps of tokens: ids and logprobs."""
    return _joined((tokens.ids, tokens.logprobs))


def digest_of(ids: Ids | PlacedIds) -> bytes:
    """Return 16 bytes that are equal for equal ids, wherever these are."""
    if isinstance(ids, PlacedIds):
        return ids.digest
    return blake2b(ids.data, digest_size=16).digest()


def fetched(there: Sequence[T]) -> list[T]:
    """Return the same tokens and ids with all their arrays here; reads each place of a data plane once."""
    found: list[Any] = list(there)
    wanted: dict[int, list[int]] = {}
    for i, each in enumerate(found):
        if isinstance(each, _Handle):
            wanted.setdefault(id(each._reader), []).append(i)
    for numbers in wanted.values():
        handles = {found[i]._place: found[i] for i in numbers}
        contents = found[numbers[0]]._reader.fetch(list(handles))
        here = {place: handles[place]._with(its) for place, its in zip(handles, contents, strict=True)}
        for i in numbers:
            found[i] = here[found[i]._place]
    return found


def _from_bytes(packed: bytes) -> Tokens:
    """Unpack ids, logprobs, versions and flags; the arrays are views of these bytes."""
    n = len(packed) // _BYTES
    return Tokens(
        np.frombuffer(packed, _INT32, n),
        np.frombuffer(packed, _BOOL, n, 12 * n),
        np.frombuffer(packed, _FLOAT32, n, 4 * n),
        np.frombuffer(packed, _INT32, n, 8 * n),
    )


def _joined(arrays: Sequence[Any]) -> bytes:
    """The bytes of contiguous arrays."""
    return b"".join(arrays)


def _is_shared(values: Any, dtype: np.dtype[Any]) -> TypeGuard[NDArray[Any]]:
    """Whether records may hold the array as it is."""
    if type(values) is not np.ndarray or values.dtype != dtype or values.ndim != 1:
        return False
    flags = values.flags
    return flags.c_contiguous and not flags.writeable


def _sealed(fresh: NDArray[Any]) -> NDArray[Any]:
    """Make an array read-only.  Raises ValueError unless it has one dimension."""
    if fresh.ndim != 1:
        raise ValueError(f"an array of shape {list(fresh.shape)}; expected one dimension")
    fresh.flags.writeable = False
    return fresh


def _read_ids(values: ArrayLike) -> Ids:
    if isinstance(values, list | tuple):
        return _read_list("i", values, _is_id, "a 32-bit integer as token id or version")
    given = np.asarray(values)
    if given.size and (given.dtype.kind not in "iu" or not -_LIMIT <= given.min() <= given.max() < _LIMIT):
        raise ValueError(
            f"an array of {given.dtype} from {given.min()} to {given.max()}; expected 32-bit integers as "
            "token ids or versions"
        )
    return _sealed(np.array(given, np.int32))


def _read_logprobs(values: ArrayLike) -> NDArray[np.float32]:
    if isinstance(values, list | tuple):
        return _read_list("f", values, lambda value: isinstance(value, float | int), "a number as logprob")
    if (given := np.asarray(values)).size and given.dtype.kind not in "fiu":
        raise ValueError(f"an array of {given.dtype}; expected numbers as logprobs")
    with np.errstate(over="ignore"):  # an infinite logprob is refused where completions are checked
        return _sealed(np.array(values, np.float32))


def _read_list(kind: str, values: Sequence[Any], valid: Callable[[Any], bool], expected: str) -> NDArray[Any]:
    """Read C's ints or floats.  ``array`` refuses a float among ints, which numpy would truncate."""
    if not values:
        return _NONE[kind]
    try:
        read = array(kind, values)
    except (TypeError, OverflowError):
        wrong = [value for value in values if not valid(value)]
        raise ValueError(f"{wrong[0]!r}; expected {expected}") from None
    return np.frombuffer(read.tobytes(), kind)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and -_LIMIT <= value < _LIMIT


_NONE = {kind: np.frombuffer(b"", kind) for kind in ("i", "f")}
_EMPTY = Tokens((), (), (), ())
