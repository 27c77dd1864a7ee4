"""Reads JSON of others, repairs text that UTF-8 cannot write, and makes it harmless for a screen.  Pure.

JSON can contain lone surrogates, which no tokenizer accepts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")

DEEPEST = 100
"""Largest depth of lists and objects within each other; several libraries recurse once or more for each."""

_NAMES: Mapping[Any, str] = {dict: "a JSON object", list: "a JSON list", object: "JSON"}


def read_json(text: str | bytes | bytearray, kind: type[T]) -> T:
    """Return JSON, with U+FFFD in place of each lone surrogate.

    Args:
        kind: dict, list, or object for any value.

    Raises ValueError if it is not JSON, not UTF-8, nested more than ``DEEPEST`` deep, or of another kind.
    """
    try:
        value = well_formed(json.loads(text))
    except RecursionError:
        raise ValueError(f"lists and objects more than {DEEPEST} deep") from None
    if not isinstance(value, kind):
        raise ValueError(f"expected {_NAMES[kind]}, got {json.dumps(value):.80}")
    return value


def well_formed(value: Any, *, deepest: int = DEEPEST) -> Any:
    """Return plain data with U+FFFD in place of each lone surrogate of its texts.

    Instances of subclasses of str and numbers, such as a plugin's enumeration, become plain Python values.

    Raises ValueError if lists and objects are nested more than ``deepest`` deep.
    """
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if not isinstance(value, (Mapping, list, tuple)):
        return value
    if not deepest:
        raise ValueError(f"lists and objects more than {DEEPEST} deep")
    if isinstance(value, Mapping):
        return {
            well_formed(key, deepest=deepest - 1): well_formed(part, deepest=deepest - 1)
            for key, part in value.items()
        }
    return [well_formed(part, deepest=deepest - 1) for part in value]


def lone_surrogate(value: Any) -> str:
    """Return a lone surrogate in the texts of plain data, or an empty string."""
    if isinstance(value, str):
        return next((c for c in value if "\ud800" <= c <= "\udfff"), "") if _text(value) != value else ""
    if isinstance(value, Mapping):
        value = [*value, *value.values()]
    return next(filter(None, map(lone_surrogate, value)), "") if isinstance(value, (list, tuple)) else ""


def unreadable(surrogate: str) -> str:
    """Describe a text that is refused: the end of a sentence about its owner."""
    return f"has a text with the lone surrogate {surrogate!r}, which no tokenizer reads; repair the text"


def _text(text: str) -> str:
    text = str.__str__(text)
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


_HARMFUL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and newline
    "\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"  # end a line, or turn the direction of text
    "\ud800-\udfff\U000e0000-\U000e007f]"  # halves of characters, and invisible tags
)


def inert(text: str) -> str:
    """Replace each character that could control a terminal, hide text or turn its direction by a visible one.

    C0 controls become their pictures (``␛``), all others their code (``⟨202E⟩``).  Tabs and newlines stay.
    """
    return _HARMFUL.sub(_picture, text)


def _picture(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"\u27e8{code:04X}\u27e9"
