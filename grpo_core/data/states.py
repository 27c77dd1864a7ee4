"""States of dataloaders, and prompts, as JSON values and arrays; never a pickle.

    packed({"n": 3, "rng": (1, array([5, 6]))})
        -> {"n": 3, "rng": {"$": "tuple", "of": [1, {"$": "array", "dtype": "<i8", "shape": [2], "at": 0}]}},
           [b"..."]

JSON values stay as they are; everything else is an object with the key ``$``.  The bytes of arrays and
tensors are kept separately, and ``to_safetensors`` writes them to a file.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import math
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grpo_core.contracts.errors import PluginError

_TAG = "$"
_AS_TEXT: Mapping[str, tuple[type, Callable[[Any], str], Callable[[str], Any]]] = {
    "datetime": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "date": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
    "time": (datetime.time, datetime.time.isoformat, datetime.time.fromisoformat),
    "decimal": (decimal.Decimal, str, decimal.Decimal),
    "uuid": (uuid.UUID, str, uuid.UUID),
}
"""Types that are written as text; a datetime is a date as well, and comes first."""


def packed(value: Any, who: str = "the state") -> tuple[Any, list[bytes]]:
    """Return a value as JSON values, and the bytes of its arrays.

    Raises PluginError, which says where in ``who`` it is, for a value that cannot be kept without a pickle.
    """
    arrays: list[bytes] = []
    try:
        return _packed(value, arrays, who), arrays
    except RecursionError:
        raise PluginError(f"{who} contains itself, or is nested too deeply to be saved") from None


def unpacked(value: Any, arrays: Sequence[bytes]) -> Any:
    """Invert ``packed``.  Raises ValueError for anything that ``packed`` does not return."""
    if isinstance(value, list):
        return [unpacked(each, arrays) for each in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: unpacked(each, arrays) for key, each in value.items()}
    match value:
        case {"$": "tuple", "of": list(items)}:
            return tuple(unpacked(each, arrays) for each in items)
        case {"$": "set", "of": list(items)}:
            return {unpacked(each, arrays) for each in items}
        case {"$": "dict", "of": list(items)}:
            return {unpacked(key, arrays): unpacked(each, arrays) for key, each in items}
        case {"$": "float", "of": str(text)}:
            return float(text)
        case {"$": "bytes", "of": str(text)}:
            return base64.b64decode(text)
        case {"$": "array", "dtype": dtype, "shape": list(shape), "at": int(place)}:
            import numpy as np

            return np.frombuffer(arrays[place], _numpy_dtype(dtype)).reshape(shape).copy()
        case {"$": "number", "dtype": dtype, "at": int(place)}:
            import numpy as np

            return np.frombuffer(arrays[place], _numpy_dtype(dtype))[0]
        case {"$": "tensor", "dtype": str(dtype), "shape": list(shape), "at": int(place)}:
            import torch

            flat = torch.tensor(list(arrays[place]), dtype=torch.uint8)
            return flat.view(getattr(torch, dtype)).reshape(shape)
        case {"$": str(name), "of": str(text)} if name in _AS_TEXT:
            return _AS_TEXT[name][2](text)
    raise ValueError(f"{value!r:.80} cannot be part of a state")


def to_safetensors(arrays: Sequence[bytes]) -> bytes:
    """Return the contents of a file with these arrays."""
    import numpy as np
    from safetensors.numpy import save

    written: bytes = save({str(nth): np.frombuffer(data, np.uint8) for nth, data in enumerate(arrays)})
    return written


def from_safetensors(data: bytes) -> list[bytes]:
    """Return the arrays of a file that ``to_safetensors`` wrote."""
    from safetensors.numpy import load

    found = load(data)
    return [found[str(nth)].tobytes() for nth in range(len(found))]


def _packed(value: Any, arrays: list[bytes], where: str) -> Any:
    match value:
        case None | bool():
            return value
        case float() if not math.isfinite(value):
            return {_TAG: "float", "of": str(float(value))}
        case list():
            return [_packed(each, arrays, f"{where}[{nth}]") for nth, each in enumerate(value)]
        case tuple():
            return {_TAG: "tuple", "of": _packed(list(value), arrays, where)}
        case set() | frozenset():
            return {_TAG: "set", "of": _packed(sorted(value, key=repr), arrays, where)}
        case Mapping():
            if _TAG not in value and all(type(key) is str for key in value):
                return {key: _packed(each, arrays, f"{where}[{key!r}]") for key, each in value.items()}
            items = [
                [_packed(key, arrays, f"a key of {where}"), _packed(each, arrays, f"{where}[{key!r}]")]
                for key, each in value.items()
            ]
            return {_TAG: "dict", "of": items}
        case bytes() | bytearray():
            return {_TAG: "bytes", "of": base64.b64encode(value).decode()}
    if type(value) in (int, float, str):
        return value
    if (found := _packed_array(value, arrays)) is not None:
        return found
    for name, (kind, text, _) in _AS_TEXT.items():
        if isinstance(value, kind):
            return {_TAG: name, "of": text(value)}
    for plain in (int, float, str):
        if isinstance(value, plain):  # of an enumeration, say
            return plain(value)
    raise PluginError(
        f"{where} is {value!r:.80} of type {type(value).__name__}, which no checkpoint can hold: it keeps "
        "dicts, lists, tuples, sets, numbers, texts, bytes, dates, None, arrays of numpy and tensors of torch"
    )


def _packed_array(value: Any, arrays: list[bytes]) -> Any:
    """Return an array, a number of numpy or a tensor; None for anything else."""
    if (np := sys.modules.get("numpy")) is not None:
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            arrays.append(value.tobytes())
            return {
                _TAG: "array",
                "dtype": value.dtype.descr if value.dtype.names else value.dtype.str,
                "shape": list(value.shape),
                "at": len(arrays) - 1,
            }
        if isinstance(value, np.generic) and not value.dtype.hasobject and value.dtype.itemsize:
            arrays.append(value.tobytes())
            dtype = value.dtype.descr if value.dtype.names else value.dtype.str
            return {_TAG: "number", "dtype": dtype, "at": len(arrays) - 1}
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        there = value.detach().to("cpu").contiguous().reshape(-1)
        arrays.append(bytes(there.view(torch.uint8).numpy()) if there.numel() else b"")
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TAG: "tensor", "dtype": dtype, "shape": list(value.shape), "at": len(arrays) - 1}
    return None


def _numpy_dtype(given: Any) -> Any:
    import numpy as np

    return np.dtype([tuple(each) for each in given] if isinstance(given, list) else given)
