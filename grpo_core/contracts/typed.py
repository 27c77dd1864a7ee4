"""Checks the types of values from JSON files, configurations and options."""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import attrs

from grpo_core.contracts.errors import CheckpointError, ConfigError, shortened

if TYPE_CHECKING:
    import cattrs

T = TypeVar("T")

Count = Annotated[int, "a whole number of at least 0"]
LONGEST = 80
"""Number of characters of a wrong value that a message shows."""
REQUIRED: dict[type, Sequence[str]] = {}
"""For each record that is saved without some of its keys, those that it is saved with."""
_NAMES: Mapping[Any, str] = {
    bool: "true or false",
    str: "a string",
    int: "a whole number",
    float: "a number",
    types.NoneType: "null",
}
_HOLDING: Mapping[Any, str] = {list: "a list", tuple: "a list", Sequence: "a list", dict: "a table"}


def read(path: Path, kind: type[T]) -> T:
    """Return the contents of a JSON file of a checkpoint; ``kind`` is as in ``checked``.  Raises OSError.

    Raises CheckpointError, with the exit status of wrong input, if the file is not JSON, or a value has
    another type.
    """
    return read_both(path, kind)[1]


def read_both(path: Path, kind: type[T]) -> tuple[Any, T]:
    """Return the contents as JSON values as well; otherwise like ``read``."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return values, checked(values, kind)
    except (ValueError, RecursionError) as error:
        wrong = CheckpointError(
            f"{path}: {error or type(error).__name__}. Another program or version has written it: remove its "
            "checkpoint to continue from the one before"
        )
        wrong.exit_status = ConfigError.exit_status
        raise wrong from error


@cache
def converter() -> cattrs.Converter:
    """Return the converter that ``checked`` uses."""
    import cattrs  # most commands read no checkpoint
    from cattrs.strategies import configure_union_passthrough

    made = cattrs.Converter()
    configure_union_passthrough(bool | int | float | str | None, made)
    return made


def checked(value: Any, kind: type[T], where: str = "") -> T:
    """Return a value that was read from JSON.  Raises ValueError, which names the first key that is wrong.

    Args:
        kind: a type of Python; an attrs class is read from a table, whose other keys may hold anything.
        where: the value's key.
    """
    for place, expected, found in wrong(value, kind, where):
        raise ValueError(f"{place or 'it'} is {shortened(json.dumps(found), LONGEST)}; expected {expected}")
    from cattrs import BaseValidationError, transform_error

    try:
        return converter().structure(value, kind)
    except BaseValidationError as error:
        said = transform_error(error, where or "$", format_exception=lambda each, kind: str(each))
        raise ValueError(said[0]) from error


def of_plain(value: Any, kind: Any) -> bool:
    """Return whether a value is of a type that is not a container; a bool is no number."""
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, int | float if kind is float else kind)


def of_json(value: Any, kind: Any) -> bool:
    """Return whether a value of a JSON file is of such a type; its numbers are finite."""
    return of_plain(value, kind) and (kind is not float or math.isfinite(value))


def wrong(
    value: Any, kind: Any, where: str = "", is_of: Callable[[Any, Any], bool] = of_json
) -> Iterator[tuple[str, str, Any]]:
    """Yield the key of each wrong value, what is expected there, and the value.

    Args:
        kind: as in ``checked``.
        where: the value's key.
        is_of: whether a value is of a type that is not a container.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return
    if origin is Annotated:
        if not is_of(value, int) or value < 0:
            yield where, arguments[1], value
    elif origin is typing.Literal:
        if value not in arguments:
            yield where, " or ".join(map(repr, arguments)), value
    elif origin in (typing.Union, types.UnionType):
        if all(any(wrong(value, each, where, is_of)) for each in arguments):
            inside = [each for each in arguments if _name(each) == _HOLDING.get(type(value))]
            of_all = [(where, " or ".join(map(_name, arguments)), value)]
            yield from wrong(value, inside[0], where, is_of) if len(inside) == 1 else of_all
    elif attrs.has(kind) and not isinstance(value, kind):
        if not isinstance(value, dict):
            yield where, "a table", value
            return
        for each in attrs.fields(attrs.resolve_types(kind)):
            place = f"{where}.{each.name}" if where else each.name
            if each.name in value:
                yield from wrong(value[each.name], each.type, place, is_of)
            elif each.default is attrs.NOTHING or each.name in REQUIRED.get(kind, ()):
                yield place, "a value; the key is missing", None
    elif (origin or kind) in (list, tuple, Sequence):
        fixed = origin is tuple and arguments[-1] is not ...
        if not isinstance(value, list | tuple) or (fixed and len(value) != len(arguments)):
            yield where, f"a list of {len(arguments)} values" if fixed else "a list", value
        else:
            kinds: Sequence[Any] = arguments if fixed else [*arguments[:1], Any][:1] * len(value)
            for i, (each, item) in enumerate(zip(kinds, value, strict=True)):
                yield from wrong(item, each, f"{where}[{i}]", is_of)
    elif (origin or kind) in (dict, Mapping):
        if not isinstance(value, Mapping):
            yield where, "a table", value
        elif arguments:
            for key, item in value.items():
                yield from wrong(item, arguments[1], f"{where}.{key}" if where else key, is_of)
    elif not is_of(value, kind):
        yield where, _NAMES.get(kind, str(kind)), value


def _name(kind: Any) -> str:
    origin = typing.get_origin(kind)
    if origin is Annotated:
        return str(typing.get_args(kind)[1])
    return _NAMES.get(kind) or _HOLDING.get(origin or kind, "a table")
