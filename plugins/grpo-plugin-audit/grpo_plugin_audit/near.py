"""Near duplicates of training texts among held-out texts.  Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import islice

ALIKE = 0.6
"""Smallest share of common shingles of near duplicates."""
LONG_ENOUGH = 8
"""Smallest number of shingles of a compared text: short texts are similar by chance."""
COMMON = 0.01
"""Share of texts above which a shingle counts as part of a template."""
TEMPLATE = 1000
"""Number of training texts that are searched for templates."""
CHARACTERS = 4000
"""Number of leading characters of a text that are compared."""

_WORD = re.compile(r"[぀-ヿ㐀-鿿]|[^\W぀-ヿ㐀-鿿]+")  # a character of Chinese or Japanese counts as a word
_FIGURE = re.compile(r"\d+|[+*/^=<>\u00d7\u00f7]|-(?=\s*\d)")

Shingle = tuple[str, str, str]


def nearly_leaked(train: Sequence[str], held_out: Sequence[str]) -> dict[int, int]:
    """Return the index of each held-out text with a near duplicate, and the index of that training text.

    Two texts are near duplicates if they have the same figures in the same order, and at least ``ALIKE`` of
    their shingles (three consecutive words) are common.  Different figures make a different exercise.
    Shingles of many texts belong to a template and are ignored, so that two exercises of a template are not
    duplicates.  Exact duplicates are found by ``leaked`` of the core.

    Memory depends on the held-out texts only.  Each training text is read once, and most of them are skipped
    because of their figures.
    """
    texts = [_normal(text) for text in held_out]
    figures: dict[tuple[str, ...], list[int]] = {}
    for index, text in enumerate(texts):
        figures.setdefault(_figures(text), []).append(index)
    template = _template(texts, train)
    own = [_shingles(text) - template for text in texts]
    found: dict[int, int] = {}
    for index, raw in enumerate(train):
        text = _normal(raw)
        others = [other for other in figures.get(_figures(text), ()) if other not in found]
        shingles = _shingles(text) - template if others else set()
        if len(shingles) < LONG_ENOUGH:
            continue
        for other in others:
            if len(own[other]) >= LONG_ENOUGH and held_out[other] != raw:
                common = len(shingles & own[other])
                if common >= ALIKE * (len(shingles) + len(own[other]) - common):
                    found[other] = index
    return dict(sorted(found.items()))


def _normal(text: str) -> str:
    return text[:CHARACTERS].casefold()


def _figures(text: str) -> tuple[str, ...]:
    return tuple(_FIGURE.findall(text))


def _shingles(text: str) -> set[Shingle]:
    words = _WORD.findall(text)
    return set(zip(words, words[1:], words[2:], strict=False))


def _template(texts: Sequence[str], train: Sequence[str]) -> set[Shingle]:
    """Return the shingles that many held-out texts and many of the first training texts contain."""
    number: Counter[Shingle] = Counter()
    seen = [*texts, *map(_normal, islice(train, TEMPLATE))]
    for text in seen:
        number.update(_shingles(text))
    return {shingle for shingle, times in number.items() if times > max(3, COMMON * len(seen))}
