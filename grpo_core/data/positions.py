"""Fingerprints of rows, which prove that a resumed dataloader gives the rows that it would have given.  Pure.

A fingerprint has a digest and the beginning of the text for each field of a row, as the dataloader gave it.
Numbers and texts count by value; bytes, arrays and images by their contents.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from attrs import frozen

from grpo_core.contracts.errors import shortened
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
    found: str


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
    text = value if isinstance(value, str) else repr(value) if _is_plain(value) else type(value).__name__
    return shortened(text, SHOWN)


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | bool | list | tuple | dict | set | frozenset | type(None))


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
