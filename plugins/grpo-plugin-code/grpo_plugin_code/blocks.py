"""Finds the program in a reply: blocks of code between fences.  Pure."""

from __future__ import annotations

import re
import textwrap

from attrs import frozen

PYTHON = ("python", "py", "python3")
LONGEST = 100_000
"""Characters of a program; a longer one is not run."""
MARGIN = 3
"""Further columns by which the end of a block may be indented: the fences of docstrings are deeper."""

_FENCE = re.compile(r"([^`]*+)(`{3,}+)([^`]*+)")
_LANGUAGE = re.compile(r"[\w+#-]*")
_ITEM = " \t-*+.)0123456789"
"""Characters of the beginning of a list's item, which indents what follows."""


@frozen
class _Fence:
    """The beginning of a block."""

    marks: str
    indent: int
    language: str

    def ends(self, line: str) -> bool:
        """Return whether the block ends at this line; more text may follow in it."""
        said = line.lstrip(" \t")
        return said.startswith(self.marks) and len(line) - len(said) <= self.indent + MARGIN


def program_of(reply: str) -> str | None:
    """Return the last block of Python, or without one the last unmarked block; None if it cannot be run.

    A block without an end counts: a limit of tokens may have cut it off.
    """
    blocks = blocks_of(reply)
    programs = [text for language, text in blocks if language in PYTHON] or [
        text for language, text in blocks if not language
    ]
    return programs[-1] if programs and len(programs[-1]) <= LONGEST else None


def blocks_of(reply: str) -> list[tuple[str, str]]:
    """Return the language, in lower case, and the text of each block; one that only begins is none."""
    found: list[tuple[str, str]] = []
    opened, lines = None, list[str]()
    for line in [*reply.replace("\r\n", "\n").split("\n"), None]:
        if opened is None:
            opened = None if line is None else _opened(line)
        elif line is None or opened.ends(line):
            text = "\n".join(lines)
            if line is not None or text.strip():
                # without the margin of a list's item; others stay, since dedent empties blank lines
                plain = textwrap.dedent(text) if text.lstrip("\n")[:1].isspace() else text
                found.append((opened.language, plain))
            opened, lines = None if line is None else _opened_after(line), []
        else:
            lines.append(line)
    return found


def _opened(line: str) -> _Fence | None:
    """Return the fence that begins a block in this line.

    Text may stand before it, as in "So: ```python"; then a language and nothing else may follow.
    """
    parts = _FENCE.fullmatch(line)
    if parts is None:
        return None
    before, marks, told = parts.groups()
    if before.strip() and re.search(r"\s\S", told):
        return None
    language = _LANGUAGE.match(told.strip())
    indent = len(before) - len(before.lstrip(_ITEM))
    return _Fence(marks, indent, language[0].lower() if language else "")


def _opened_after(line: str) -> _Fence | None:
    """Return the fence that begins another block in the line that ends one: "``` and ```py", or "```bash"."""
    rest = line.lstrip(" \t").lstrip("`")
    if "`" in rest:
        return _opened(rest)
    return _opened(line) if re.match(r"\w\S*\s*$", rest) else None
