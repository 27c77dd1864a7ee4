"""Decodes tokens: what they add to the text before them.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

PART = "\N{REPLACEMENT CHARACTER}"
"""Decoded from bytes that are part of a character."""
_TAIL = 8
"""Number of last tokens that are decoded of the text before, and more if these begin within a character."""


def added(decode: Callable[[list[int]], str], before: Sequence[int], tokens: Sequence[int]) -> str:
    """Return what tokens add to the text of the tokens before them: the text of all, minus the text before.

    Decoded alone, tokens may lose their first blank, and bytes may not continue a character.

    Args:
        decode: decodes tokens without changes to blanks.
    """
    size = _TAIL
    while True:
        tail = list(before[-size:])
        start = decode(tail)
        if (start and PART not in start) or size >= len(before):
            break
        size *= 2
    whole = decode([*tail, *tokens])
    for known in (start, start.rstrip(PART)):
        if whole.startswith(known):
            return whole[len(known) :]
    return decode(list(tokens))


def without_clean_up(backend: Any) -> None:
    """Let a tokenizer of the library ``tokenizers`` keep blanks when it decodes, whatever its file says."""
    decoder: Any = getattr(backend, "decoder", None)
    if getattr(decoder, "cleanup", False):
        decoder.cleanup = False
