"""Finds held-out texts that nearly repeat texts that are trained on.  Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice

ALIKE = 0.6
"""Two texts are near duplicates from this share of common shingles on."""
LONG_ENOUGH = 8
"""Texts with fewer shingles of their own are not compared: short texts are alike by chance."""
COMMON = 0.01
"""Shingles in a larger share of the texts belong to a template, and say nothing about a single text."""
TEMPLATE = 1000
"""Number of training texts in which templates are found."""
CHARACTERS = 4000
"""Number of characters of a text that are compared."""

_WORD = re.compile(r"[぀-ヿ㐀-鿿]|[^\W぀-ヿ㐀-鿿]+")  # a character of Chinese or Japanese counts as a word
_FIGURE = re.compile(r"\d+|[+*/^=<>\u00d7\u00f7]|-(?=\s*\d)")

Shingle = tuple[str, str, str]


def nearly_leaked(train: Sequence[str], held_out: Sequence[str]) -> dict[int, int]:
    """Return the places of held-out texts that are nearly trained on, each with that of a training text.

    Two texts are near duplicates if they have the same figures in the same order, and if at least ``ALIKE``
    of their shingles (three words in a row) are common.  Other figures make another exercise.  Shingles that
    many texts have belong to a template and do not count, so that two exercises of a template are not alike.
    Equal texts are left to ``leakage.leaked`` of the core.

    The memory depends on the held-out texts; the time is that of reading each training text once, and most of
    these are passed over because of their figures.
    """
    texts = [_normal(text) for text in held_out]
    figures: dict[tuple[str, ...], list[int]] = {}
    for place, text in enumerate(texts):
        figures.setdefault(_figures(text), []).append(place)
    template = _template(texts, train)
    own = [_shingles(text) - template for text in texts]
    found: dict[int, int] = {}
    for place, raw in enumerate(train):
        text = _normal(raw)
        others = [other for other in figures.get(_figures(text), ()) if other not in found]
        shingles = _shingles(text) - template if others else set()
        if len(shingles) < LONG_ENOUGH:
            continue
        for other in others:
            if len(own[other]) >= LONG_ENOUGH and held_out[other] != raw:
                common = len(shingles & own[other])
                if common >= ALIKE * (len(shingles) + len(own[other]) - common):
                    found[other] = place
    return dict(sorted(found.items()))


def _normal(text: str) -> str:
    return text[:CHARACTERS].casefold()


def _figures(text: str) -> tuple[str, ...]:
    return tuple(_FIGURE.findall(text))


def _shingles(text: str) -> set[Shingle]:
    words = _WORD.findall(text)
    return set(zip(words, words[1:], words[2:], strict=False))


def _template(texts: Sequence[str], train: Sequence[str]) -> set[Shingle]:
    """Return the shingles that many of the held-out and of the first training texts have."""
    number: Counter[Shingle] = Counter()
    seen = [*texts, *map(_normal, islice(train, TEMPLATE))]
    for text in seen:
        number.update(_shingles(text))
    return {shingle for shingle, times in number.items() if times > max(3, COMMON * len(seen))}
