"""Fingerprints of rows, which prove that a resumed dataloader gives the rows that it would have given.  Pure.

A fingerprint has a digest and the beginning of the text for each field of a row, as the dataloader gave it.
Numbers and texts count by value; bytes, arrays and images by their contents.  Rows and ids that are repeated
are found as well.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from attrs import frozen

from grpo_core.contracts.errors import PluginError, shortened
from grpo_core.contracts.records import Prompt

SHOWN = 60
"""Length of the text that a fingerprint keeps of a field."""

Fingerprint = Mapping[str, list[str]]
"""Digest and cut text by field."""
NO_FIELDS: Collection[str] = frozenset()


def columns_of(row: Any) -> Mapping[str, Any]:
    """Return the fields of a row, which may be a prompt or a text."""
    if isinstance(row, Prompt):
        return {"id": row.id, "messages": list(row.messages), "answer": row.answer, **row.info}
    return row if isinstance(row, Mapping) else {"": row}


def fingerprint(row: Any, without: Collection[str] = NO_FIELDS) -> dict[str, list[str]]:
    """Return the fingerprint of a row.

    Args:
        without: fields to leave out, since they differ each time the row is read.
    """
    return {
        str(name): [_digest(value), _shown(value)]
        for name, value in columns_of(row).items()
        if str(name) not in without
    }


@frozen
class Difference:
    """The first difference between the rows that were expected and the rows that were read."""

    row: int
    """Number of the row, from 0."""
    field: str
    expected: str
    actual: str


def difference(
    expected: Iterable[Fingerprint], found: Iterable[Fingerprint], first: int = 0
) -> Difference | None:
    """Compare rows from number ``first`` on; None if they are equal."""
    for number, (one, other) in enumerate(zip(expected, found, strict=False), first):
        for name in (*one, *(name for name in other if name not in one)):
            before, after = one.get(name), other.get(name)
            if before is None or after is None or before[0] != after[0]:
                return Difference(number, name, _text(before), _text(after))
    return None


def varying(one: Iterable[Fingerprint], other: Iterable[Fingerprint]) -> set[str]:
    """Return the fields that differ between two readings of the same rows."""
    return {
        name
        for first, second in zip(one, other, strict=False)
        for name in {*first, *second}
        if name not in first or name not in second or first[name][0] != second[name][0]
    }


def _text(entry: Sequence[str] | None) -> str:
    return "(no such field)" if entry is None else entry[1]


def _shown(value: Any) -> str:
    plain = isinstance(value, int | float | bool | list | tuple | dict | set | frozenset | type(None))
    text = value if isinstance(value, str) else repr(value) if plain else type(value).__name__
    return shortened(text, SHOWN)


def _digest(value: Any) -> str:
    hashed = hashlib.blake2b(digest_size=8)
    _add(hashed, value)
    return hashed.hexdigest()


def _add(hashed: Any, value: Any) -> None:
    """Add a value to a hash, with its kind, so that 1 and "1" differ."""
    match value:
        case None | bool():
            hashed.update(f"{value};".encode())
        case str():
            data = value.encode("utf-8", "surrogatepass")
            hashed.update(b"s%d:" % len(data) + data)
        case int() | float():
            whole = isinstance(value, float) and math.isfinite(value) and value.is_integer()
            hashed.update(f"n{int(value) if whole else value};".encode())
        case bytes() | bytearray() | memoryview():
            hashed.update(b"b%d:" % len(value) + bytes(value))
        case Mapping():
            hashed.update(b"{")
            for key in sorted(value, key=repr):
                _add(hashed, key)
                _add(hashed, value[key])
            hashed.update(b"}")
        case list() | tuple():
            hashed.update(b"[")
            for each in value:
                _add(hashed, each)
            hashed.update(b"]")
        case set() | frozenset():
            hashed.update(b"<" + "".join(sorted(map(_digest, value))).encode() + b">")
        case _:
            _add_object(hashed, value)


def _add_object(hashed: Any, value: Any) -> None:
    """Add an array, a tensor, an image, or another object by the text that describes it."""
    hashed.update(type(value).__name__.encode())
    if hasattr(value, "detach"):
        value = value.detach().to("cpu").numpy()
    if hasattr(value, "dtype") and hasattr(value, "tobytes"):
        if getattr(value, "shape", None) == ():
            _add(hashed, value.item())
        elif value.dtype.hasobject:
            _add(hashed, value.tolist())
        else:
            hashed.update(f"{value.dtype.str}{value.shape}".encode() + value.tobytes())
    elif hasattr(value, "mode") and hasattr(value, "tobytes"):
        hashed.update(f"{value.mode}{value.size}".encode() + value.tobytes())
    else:
        text = repr(value)
        hashed.update((type(value).__qualname__ if " at 0x" in text else text).encode("utf-8", "replace"))


# ---------------------------------------------------------------------------------- repeats

COMPARED = 8
"""Number of first rows that show whether two epochs have one order."""
WINDOW = 65_536
"""Number of the last rows whose ids are compared."""


class Beginnings:
    """The first rows of the first two epochs of a stream, which show whether it repeats its order."""

    def __init__(self) -> None:
        self._rows: tuple[list[Fingerprint], list[Fingerprint]] = [], []

    def repeated(self, epoch: int, row: Fingerprint) -> bool:
        """Note a row; return whether the second epoch has now begun with the rows of the first."""
        if epoch > 1 or len(self._rows[epoch]) == COMPARED:
            return False
        self._rows[epoch].append(row)
        first, second = self._rows
        return len(second) == COMPARED and difference(first, second) is None and len(first) == COMPARED


class Ids:
    """The ids of the rows of a dataloader, which may come once in an epoch.

    A repeat within the look-ahead and the open slots is an error: two groups of one prompt would be in use at
    once, which is nearly always a loader whose workers all read the same rows.  The first repeat that is
    farther apart is a warning.

    Args:
        who: the dataloader, for messages.
    """

    def __init__(self, who: str) -> None:
        self._who = who
        self._seen: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        """Epoch and number of the row, by a digest of its id."""
        self._warned = False

    def add(self, id: str, epoch: int, row: int, *, near: int, hint: str = "") -> str:
        """Note the id of a row; return a warning about the first repeat.

        Args:
            row: number of the row, from 0, over all epochs.
            near: number of rows that are read ahead or in use at once.
            hint: what the dataloader is likely to be, for the error.

        Raises PluginError for a repeat that is near.
        """
        key = blake2b(id.encode("utf-8", "surrogatepass"), digest_size=8).digest()
        before = self._seen.pop(key, None)
        self._seen[key] = epoch, row
        while len(self._seen) > WINDOW:
            self._seen.popitem(last=False)
        if before is None or before[0] != epoch or row - before[1] > WINDOW:
            return ""
        rows = f"rows {before[1] + 1:,} and {row + 1:,}, of one epoch, have the id {id!r}"
        if row - before[1] <= near:
            raise PluginError(
                f"{self._who}: {rows}; ids are unique among the prompts in use.{hint} If the repeat is "
                "meant, as with a weighted sampler, set data_options.repeats = true"
            )
        warned, self._warned = self._warned, True
        return "" if warned else f"{self._who}: {rows}; data_options.repeats = true says that this is meant"
