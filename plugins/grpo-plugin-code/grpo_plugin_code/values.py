"""Parsing and comparison of values from a sandbox, which are lines of JSON (see ``inside.py``).

The model's program may forge a line.  Lines are therefore never converted to Python's sets or dicts, where
numbers with colliding hashes would take quadratic time.  Both sides of a comparison are converted to a
canonical text, which is equal exactly for values that are equal in Python.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from operator import itemgetter
from typing import Any

MOST = 2**20
"""Longest line that is parsed, in characters: parsed JSON takes up to thirty times the memory."""
TEXT = '["str", '
"""Prefix of the line of a string."""
WRONG = (TypeError, ValueError, KeyError, IndexError, RecursionError, OverflowError, AttributeError)
"""Errors that parsing an invalid line may raise."""


class NotANumberError(ValueError):
    """Raised for a value that contains NaN, which equals nothing."""


def text_in(line: str) -> str:
    """Parse the line of a string.  Raises ValueError for any other line.

    There is no limit of length, since a string takes at most four times the memory of its line.
    """
    if line.startswith(TEXT + '"'):
        text, end = json.JSONDecoder().raw_decode(line, len(TEXT))
        if line[end:] == "]":
            return str(text)
    raise ValueError(f"it returned no text: {line:.100}")


def form_in(line: str) -> str:
    """Return the canonical form of the value in a line.

    Raises ValueError for an invalid line, or one longer than ``MOST``.
    """
    if len(line) > MOST:
        raise ValueError(f"it returned a value that takes {len(line)} characters; at most {MOST} are read")
    try:
        return _form_of_parts(*json.loads(line))
    except NotANumberError:
        raise
    except WRONG as error:
        raise ValueError(str(error)[:300]) from error


def form_of(value: Any) -> str:
    """Return the canonical form of a value.  Raises ValueError if no sandbox can return an equal value."""
    match value:
        case None:
            return "None"
        case str():
            return json.dumps(value)
        case bytes():
            return f"b{value.hex()}"
        case bool() | int() | float() | complex():
            return _number(value)
        case Mapping():
            return _dict([(form_of(key), form_of(each)) for key, each in value.items()])
        case AbstractSet():
            return _set([form_of(each) for each in value])
        case tuple():
            return f"({','.join(map(form_of, value))})"
        case list():
            return f"[{','.join(map(form_of, value))}]"
    raise ValueError(f"a value of type {type(value).__name__} cannot come out of a sandbox")


def _form_of_parts(kind: str, content: Any) -> str:
    match kind:
        case "bool" | "str" if type(content).__name__ == kind:
            return form_of(content)
        case "NoneType":
            return "None"
        case "int":
            return _number(int(content, 16))
        case "float":
            return _number(float.fromhex(content))
        case "bytes":
            return form_of(bytes.fromhex(content))
        case "complex":
            return _number(complex(float.fromhex(content[0]), float.fromhex(content[1])))
        case "list":
            return f"[{','.join(_form_of_parts(*each) for each in content)}]"
        case "tuple":
            return f"({','.join(_form_of_parts(*each) for each in content)})"
        case "set" | "frozenset":
            return _set([_form_of_parts(*each) for each in content])
        case "dict":
            return _dict([(_form_of_parts(*key), _form_of_parts(*each)) for key, each in content])
    raise ValueError(f"it returned {kind}: {content}"[:300])


def _number(value: Any) -> str:
    """Return the canonical form of a number; 1, 1.0, True and 1+0j are equal."""
    if value != value:
        raise NotANumberError("it is not a number (NaN), which equals nothing")
    if isinstance(value, complex):
        return f"{_number(value.real)}+{_number(value.imag)}j" if value.imag else _number(value.real)
    if isinstance(value, float) and not value.is_integer():  # includes infinities
        return value.hex()
    return hex(int(value))


def _set(forms: Sequence[str]) -> str:
    return f"{{{','.join(form for form, _ in groupby(sorted(forms)))}}}"


def _dict(forms: Sequence[tuple[str, str]]) -> str:
    """Return the canonical form of a dict; the last value of a repeated key counts."""
    entries = [list(group)[-1] for _, group in groupby(sorted(forms, key=itemgetter(0)), key=itemgetter(0))]
    return f"{{{','.join(f'{key}:{value}' for key, value in entries)}:}}"
