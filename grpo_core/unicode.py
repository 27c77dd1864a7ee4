"""Repairs text that UTF-8 cannot write: lone surrogates, which JSON can spell and no tokenizer reads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEEPEST = 100
"""Largest depth of lists and objects within each other; several libraries recurse once or more for each."""


def well_formed(value: Any, *, deepest: int = DEEPEST) -> Any:
    """Return plain data with U+FFFD in place of each lone surrogate of its texts.

    Texts and numbers of other classes, such as a plugin's enumeration, become those of Python.

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
