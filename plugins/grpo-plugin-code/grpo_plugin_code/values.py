"""Values that come out of a sandbox, as lines of JSON (see ``inside.py``), and how they are compared.

Who writes such a line may be the model's program.  A line is therefore never made into Python's sets or
dicts: numbers that were chosen to have the same hash would make that take the square of their number.  Both
sides of a comparison become a text instead, which is the same exactly for values that Python takes as equal.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import groupby
from operator import itemgetter
from typing import Any

MOST = 2**20
"""Characters of a line that is read: JSON takes up to thirty times as many bytes when it is read."""
TEXT = '["str", '
"""Beginning of the line of a text."""
WRONG = (TypeError, ValueError, KeyError, IndexError, RecursionError, OverflowError, AttributeError)
"""Errors that reading a line may raise if it is none."""


class NotANumberError(ValueError):
    """A value has a part that equals nothing, not even itself."""


def text_in(line: str) -> str:
    """Return the text that a line stands for.  Raises ValueError if it stands for none.

    A text takes at most four times the memory of its line, so it may have any length.
    """
    if line.startswith(TEXT + '"'):
        text, end = json.JSONDecoder().raw_decode(line, len(TEXT))
        if line[end:] == "]":
            return str(text)
    raise ValueError(f"it returned no text: {line:.100}")


def form_in(line: str) -> str:
    """Return the form of the value that a line stands for, by which it is compared.

    Raises ValueError if it stands for none, or is longer than what is read.
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
    """Return the form of a value of this process.  Raises ValueError if no sandbox returns an equal one."""
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
    """Return the same text for equal numbers: 1, 1.0, True and 1+0j are one value."""
    if value != value:
        raise NotANumberError("it is not a number (NaN), which equals nothing")
    if isinstance(value, complex):
        return f"{_number(value.real)}+{_number(value.imag)}j" if value.imag else _number(value.real)
    if isinstance(value, float) and not value.is_integer():  # infinities, too
        return value.hex()
    return hex(int(value))


def _set(forms: Sequence[str]) -> str:
    return f"{{{','.join(form for form, _ in groupby(sorted(forms)))}}}"


def _dict(forms: Sequence[tuple[str, str]]) -> str:
    """Return a mapping; the last of several values of a key counts."""
    entries = [list(group)[-1] for _, group in groupby(sorted(forms, key=itemgetter(0)), key=itemgetter(0))]
    return f"{{{','.join(f'{key}:{value}' for key, value in entries)}:}}"
