"""States of dataloaders, and prompts, as JSON values; never a pickle.

    packed({"n": 3, "rng": (1, array([5, 6]))})
        -> {"n": 3, "rng": {"$": "tuple", "of": [1, {"$": "array", "dtype": "<i8", "shape": [2], "of": ...}]}}

JSON values stay as they are; everything else is an object with the key ``$``.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import math
import sys
import uuid
from collections.abc import Callable, Mapping
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


def packed(value: Any, who: str = "the state") -> Any:
    """Return a value as JSON values.

    Raises PluginError, which says where in ``who`` it is, for a value that cannot be kept without a pickle.
    """
    try:
        return _packed(value, who)
    except RecursionError:
        raise PluginError(f"{who} contains itself, or is nested too deeply to be saved") from None


def unpacked(value: Any) -> Any:
    """Invert ``packed``.  Raises ValueError for anything that ``packed`` does not return."""
    if isinstance(value, list):
        return [unpacked(each) for each in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: unpacked(each) for key, each in value.items()}
    match value:
        case {"$": "tuple", "of": list(items)}:
            return tuple(unpacked(each) for each in items)
        case {"$": "set", "of": list(items)}:
            return {unpacked(each) for each in items}
        case {"$": "dict", "of": list(items)}:
            return {unpacked(key): unpacked(each) for key, each in items}
        case {"$": "float", "of": str(text)}:
            return float(text)
        case {"$": "bytes", "of": str(text)}:
            return base64.b64decode(text)
        case {"$": "array" | "number" as kind, "dtype": dtype, "shape": list(shape), "of": str(text)}:
            import numpy as np

            fields = [tuple(each) for each in dtype] if isinstance(dtype, list) else dtype
            found = np.frombuffer(base64.b64decode(text), np.dtype(fields)).reshape(shape)
            return found.copy() if kind == "array" else found[()]
        case {"$": "tensor", "dtype": str(dtype), "shape": list(shape), "of": str(text)}:
            import torch

            flat = torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
            return flat.view(getattr(torch, dtype)).reshape(shape)
        case {"$": str(name), "of": str(text)} if name in _AS_TEXT:
            return _AS_TEXT[name][2](text)
    raise ValueError(f"{value!r:.80} cannot be part of a state")


def _packed(value: Any, where: str) -> Any:
    match value:
        case None | bool():
            return value
        case float() if not math.isfinite(value):
            return {_TAG: "float", "of": str(float(value))}
        case list():
            return [_packed(each, f"{where}[{nth}]") for nth, each in enumerate(value)]
        case tuple():
            return {_TAG: "tuple", "of": _packed(list(value), where)}
        case set() | frozenset():
            return {_TAG: "set", "of": _packed(sorted(value, key=repr), where)}
        case Mapping():
            if _TAG not in value and all(type(key) is str for key in value):
                return {key: _packed(each, f"{where}[{key!r}]") for key, each in value.items()}
            items = [
                [_packed(key, f"a key of {where}"), _packed(each, f"{where}[{key!r}]")]
                for key, each in value.items()
            ]
            return {_TAG: "dict", "of": items}
        case bytes() | bytearray():
            return {_TAG: "bytes", "of": _text(value)}
    if type(value) in (int, float, str):
        return value
    if (found := _packed_array(value)) is not None:
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


def _packed_array(value: Any) -> Any:
    """Return an array, a number of numpy or a tensor; None for anything else."""
    if (np := sys.modules.get("numpy")) is not None and isinstance(value, np.ndarray | np.generic):
        dtype, is_array = value.dtype, isinstance(value, np.ndarray)
        if not dtype.hasobject and (is_array or dtype.itemsize):
            return {
                _TAG: "array" if is_array else "number",
                "dtype": dtype.descr if dtype.names else dtype.str,
                "shape": list(value.shape),
                "of": _text(value.tobytes()),
            }
    if (torch := sys.modules.get("torch")) is not None and isinstance(value, torch.Tensor):
        there = value.detach().to("cpu").contiguous().reshape(-1)
        return {
            _TAG: "tensor",
            "dtype": str(value.dtype).removeprefix("torch."),
            "shape": list(value.shape),
            "of": _text(bytes(there.view(torch.uint8).numpy()) if there.numel() else b""),
        }
    return None


def _text(value: bytes | bytearray) -> str:
    return base64.b64encode(value).decode()
