"""Checks the types of values that are read from a JSON file."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

from grpo_core.errors import CheckpointError, ConfigError, cut

T = TypeVar("T")

Count = Annotated[int, "a whole number of at least 0"]
LONGEST = 80
"""Number of characters of a wrong value that a message shows."""
_NAMES: Mapping[Any, str] = {
    bool: "true or false",
    str: "a text",
    int: "a whole number",
    float: "a finite number",
    types.NoneType: "null",
}


def read(path: Path, kind: type[T]) -> T:
    """Return the contents of a JSON file of a checkpoint.  Raises OSError.

    Args:
        kind: a ``TypedDict``; keys that it does not name may hold anything.

    Raises CheckpointError, with the exit status of wrong input, if the file is not JSON, or a value has
    another type.
    """
    try:
        value: T = checked(json.loads(path.read_text(encoding="utf-8")), kind)
        return value
    except (ValueError, RecursionError) as error:
        wrong = CheckpointError(
            f"{path}: {error or type(error).__name__}. Another program or version has written it: remove its "
            "checkpoint to continue from the one before"
        )
        wrong.exit_status = ConfigError.exit_status
        raise wrong from error


def checked(value: Any, kind: Any, where: str = "") -> Any:
    """Return a value that was read from JSON.  Raises ValueError, which names the first key that is wrong.

    Args:
        kind: a type of Python; a ``TypedDict`` stands for a table, and a list or tuple for a list.
        where: the value's key.
    """
    for place, expected, found in _wrong(value, kind, where):
        raise ValueError(f"{place or 'it'} is {cut(json.dumps(found), LONGEST)}; expected {expected}")
    return value


def _wrong(value: Any, kind: Any, where: str) -> Iterator[tuple[str, str, Any]]:
    """Yield the key of each wrong value, what is expected there, and the value."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if origin is Annotated:
        if not _is(value, int) or value < 0:
            yield where, arguments[1], value
    elif origin is typing.Literal:
        if value not in arguments:
            yield where, " or ".join(map(json.dumps, arguments)), value
    elif origin in (typing.Union, types.UnionType):
        if all(any(_wrong(value, each, where)) for each in arguments):
            yield where, " or ".join(map(_name, arguments)), value
    elif typing.is_typeddict(kind):
        yield from _wrong_table(value, kind, where)
    elif origin in (list, tuple):
        fixed = origin is tuple and arguments[-1] is not ...
        if not isinstance(value, list) or (fixed and len(value) != len(arguments)):
            yield where, f"a list of {len(arguments)} values" if fixed else "a list", value
        else:
            kinds: Sequence[Any] = arguments if fixed else [arguments[0]] * len(value)
            for i, (each, item) in enumerate(zip(kinds, value, strict=True)):
                yield from _wrong(item, each, f"{where}[{i}]")
    elif origin is dict:
        if not isinstance(value, dict):
            yield where, "a table", value
        else:
            for key, item in value.items():
                yield from _wrong(item, arguments[1], _joined(where, key))
    elif not _is(value, kind):
        yield where, _NAMES[kind], value


def _wrong_table(value: Any, kind: Any, where: str) -> Iterator[tuple[str, str, Any]]:
    if not isinstance(value, dict):
        yield where, "a table", value
        return
    for key, each in typing.get_type_hints(kind, include_extras=True).items():
        optional = typing.get_origin(each) is typing.NotRequired
        if key in value:
            yield from _wrong(value[key], typing.get_args(each)[0] if optional else each, _joined(where, key))
        elif not optional and key in kind.__required_keys__:
            yield _joined(where, key), "a value; the key is missing", None


def _is(value: Any, kind: Any) -> bool:
    if kind in (int, float) and isinstance(value, bool):
        return False
    return (
        math.isfinite(value) if kind is float and isinstance(value, int | float) else isinstance(value, kind)
    )


def _joined(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _name(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is Annotated:
        return str(typing.get_args(kind)[1])
    return _NAMES.get(kind) or ("a list" if origin in (list, tuple) else "a table")
