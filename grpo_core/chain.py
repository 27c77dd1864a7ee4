"""The hash chain of events.jsonl: each line carries a hash of its own text and of the line before it.

A line that is changed, dropped, doubled or moved breaks the chain where it happened.  A file that ends early
does not: that is what ``kill -9`` leaves.  There is no secret key, so the chain shows mistakes and damage;
whoever wants to can compute a new one.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from attrs import frozen

START = "0" * 32
"""The link before the first line."""
BLOCK = 65536
"""Bytes that are read at once to find the last line of a file."""
_END = re.compile(rb', "chain": "([0-9a-f]{32})"\}\n\Z')
_END_LENGTH = len(', "chain": ""}\n') + len(START)


@frozen(kw_only=True)
class Line:
    """A whole line of a chained file."""

    number: int
    """Number of the line, from 1."""
    value: Any
    """The JSON value without its link; None if the line is not JSON."""
    intact: bool
    """Whether the line's link fits its text and the line before it."""


def link(before: str, text: bytes) -> str:
    """Return the link of a line whose JSON object, without the link, is ``text``."""
    return blake2b(before.encode() + text, digest_size=len(START) // 2).hexdigest()


def chained(before: str, text: str) -> tuple[str, str]:
    """Return a JSON object as a line that ends with its link, and the link."""
    own = link(before, text.encode())
    return f'{text[:-1]}, "chain": "{own}"}}\n', own


def last_link(path: Path, size: int) -> str:
    """Return the link of the last line of a file's first ``size`` bytes, which end with a newline."""
    with open(path, "rb") as file:
        file.seek(max(0, size - _END_LENGTH))
        found = _END.search(file.read(min(size, _END_LENGTH)))
    return found[1].decode() if found else START


def whole_lines(path: Path) -> int:
    """Return the number of bytes up to the last newline; a large file is read from its end."""
    with open(path, "rb") as file:
        begin = file.seek(0, os.SEEK_END)
        while begin:
            end, begin = begin, max(0, begin - BLOCK)
            file.seek(begin)
            if (found := file.read(end - begin).rfind(b"\n")) >= 0:
                return begin + found + 1
    return 0


def read(path: Path) -> Iterator[Line]:
    """Yield the whole lines of a file, one at a time; a killed process may have left half a line at the end.

    After a break, the chain is followed from the link that the line states.
    """
    before = START
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            found = _END.search(line)
            text = line[: found.start()] + b"}" if found else line
            stated = found[1].decode() if found else ""
            yield Line(number=number, value=_value(text), intact=link(before, text) == stated)
            before = stated or before


def _value(text: bytes) -> Any:
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
