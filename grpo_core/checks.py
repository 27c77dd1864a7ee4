"""Sums over arrays that notice a changed number, and say which one it is.  Pure.

The words w of an array, numbered from 1, have two sums: of w, and of their places times w.  If one word has
changed by d, the first sum has changed by d and the second one by its place times d, so the quotient is the
place.  The sums are no protection against an attacker; the digests in events.jsonl are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Sums = tuple[int, int]
"""Sum of the words, and of their places times the words, modulo 2**64."""

WIDTH = 4096
"""Number of words in a row of the matrix as which a long array is summed."""
WORD = 4
"""Bytes of a word; arrays whose bytes are no multiple have words of one byte."""
MODULUS = 2**64


def sums(data: Any) -> Sums:
    """Return the sums of an array, or of anything that has a buffer."""
    import numpy as np

    words = _words(data)
    rows = len(words) // WIDTH
    matrix = words[: rows * WIDTH].reshape(rows, WIDTH)
    columns, lines = matrix.sum(0, dtype=np.uint64), matrix.sum(1, dtype=np.uint64)
    rest = words[rows * WIDTH :].astype(np.uint64)
    places = np.arange(1, WIDTH + 1, dtype=np.uint64)
    first = int(lines.sum()) + int(rest.sum())
    second = (
        int((columns * places).sum())
        + WIDTH * int((lines * np.arange(rows, dtype=np.uint64)).sum())
        + int((rest * (places[: len(rest)] + np.uint64(rows * WIDTH))).sum())
    )
    return first % MODULUS, second % MODULUS


def changed(data: Any, recorded: Sums, itemsize: int) -> int | None:
    """Return the index of the one number that differs from what was recorded.

    None if several differ, or the recorded sums do not fit any such change.  An array is intact if its
    ``sums`` are the recorded ones.
    """
    words, now = _words(data), sums(data)
    difference, places = (_signed(a - b) for a, b in zip(now, recorded, strict=True))
    if not difference or places % difference or not 1 <= places // difference <= len(words):
        return None
    begin = (places // difference - 1) * words.itemsize
    if itemsize < words.itemsize:  # the lowest bit that has changed is in one of the word's numbers
        lowest = (difference & -difference).bit_length() - 1
        begin += lowest // (8 * itemsize) * itemsize
    return begin // itemsize


def _words(data: Any) -> NDArray[Any]:
    import numpy as np

    array = np.frombuffer(data, np.uint8) if not isinstance(data, np.ndarray) else data
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return flat if flat.nbytes % WORD else flat.view(np.uint32)


def _signed(value: int) -> int:
    value %= MODULUS
    return value - MODULUS if value >= MODULUS // 2 else value


# ---------------------------------------------------------------------------------- files of tensors


def tensor_sums(path: Path) -> dict[str, list[int]]:
    """Return the sums of each tensor in a file of safetensors; none of a file that is something else."""
    try:
        return {name: list(sums(data)) for name, _, data in _tensors(path)}
    except ValueError:
        return {}


_EXPONENTS = {
    "F64": ("<u8", 0x7FF0 << 48),
    "F32": ("<u4", 0x7F80 << 16),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
"""Words of the types of numbers, and the bits that are all set in an infinity and in NaN."""
_AT_ONCE = 1 << 20
"""Number of words that are looked at together."""


def not_finite(path: Path) -> str:
    """Return the name of a tensor with a number that is not finite; "" if a file of safetensors has none."""
    import numpy as np

    try:
        found = _tensors(path)
    except ValueError:  # the file is something else
        return ""
    for name, about, data in found:
        if (kind := _EXPONENTS.get(about["dtype"])) is None:
            continue
        words, bits = data.view(kind[0]), np.array(kind[1], kind[0])
        for start in range(0, len(words), _AT_ONCE):
            if ((words[start : start + _AT_ONCE] & bits) == bits).any():
                return name
    return ""


def changed_tensor(path: Path, recorded: Mapping[str, Any]) -> str:
    """Say which tensor of a file of safetensors differs from the recorded sums; "" if none does."""
    try:
        found = _tensors(path)
    except (OSError, ValueError):
        return "its header is damaged"
    if {name for name, _, _ in found} != set(recorded):
        return "its header is damaged"
    for name, about, data in found:
        expected = (int(recorded[name][0]), int(recorded[name][1]))
        if sums(data) != expected:
            items = _product(about["shape"])
            at = changed(data, expected, len(data) // items) if items else None
            return f"tensor {name}" + ("" if at is None else f", element {_index(at, about['shape'])}")
    return ""


def differing_element(one: Path, other: Path) -> str:
    """Name the first number that differs between two files of the same tensors; "" if none does."""
    import numpy as np

    theirs = {name: data for name, _, data in _tensors(other)}
    for name, about, data in _tensors(one):
        if name in theirs and len(data) == len(theirs[name]):
            items = _product(about["shape"])
            size = len(data) // items if items else 1
            different = np.flatnonzero(data != theirs[name])
            if different.size:
                at = int(different[0]) // size
                values = [
                    _value(each[at * size : (at + 1) * size], about["dtype"]) for each in (data, theirs[name])
                ]
                return f"{name}{_index(at, about['shape'])}: {values[0]} -> {values[1]}"
    return ""


def _value(data: Any, dtype: str) -> str:
    """Return a number of a tensor as text; in hexadecimal digits if numpy has no such type."""
    import numpy as np

    kinds = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "U8": "u1", "I8": "i1"}
    if dtype in kinds:
        return repr(np.frombuffer(data.tobytes(), kinds[dtype])[0].item())
    digits: str = data[::-1].tobytes().hex()
    return f"0x{digits}"


def _tensors(path: Path) -> list[tuple[str, Mapping[str, Any], np.ndarray[Any, Any]]]:
    """Return name, header and bytes of each tensor; bytes are read from the file when they are needed."""
    import numpy as np

    content = np.memmap(path, np.uint8, "r")
    size = int.from_bytes(content[:8].tobytes(), "little")
    if size > len(content) - 8:
        raise ValueError(f"{path}: its header is longer than the file")
    header = json.loads(content[8 : 8 + size].tobytes())
    body = content[8 + size :]
    try:
        return [
            (name, about, body[slice(*about["data_offsets"])])
            for name, about in sorted(header.items(), key=lambda item: item[0])
            if name != "__metadata__"
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is no file of safetensors") from error


def _product(shape: list[int]) -> int:
    items = 1
    for size in shape:
        items *= size
    return items


def _index(flat: int, shape: list[int]) -> list[int]:
    index = []
    for size in reversed(shape):
        flat, place = divmod(flat, size)
        index.append(place)
    return index[::-1]
