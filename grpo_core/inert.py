"""Text from models, data sets, environments and plugins, made harmless for a terminal and a page.  Pure."""

from __future__ import annotations

import re

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
