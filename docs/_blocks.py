"""Replaces the generated parts of a page."""

from __future__ import annotations

from collections.abc import Mapping


def filled(text: str, parts: Mapping[str, str]) -> str:
    """Return the page with these parts, each between its comments ``begin NAME...`` and ``end NAME``."""
    for name, part in parts.items():
        begin, end = f"<!-- begin {name}", f"<!-- end {name} -->"
        before, _, rest = text.partition(begin)
        first, _, _ = rest.partition("\n")
        text = f"{before}{begin}{first}\n{part}\n{end}{rest.partition(end)[2]}"
    return text
