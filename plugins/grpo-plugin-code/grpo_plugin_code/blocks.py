"""Extracts programs from replies: blocks of code between fences.  Pure."""

from __future__ import annotations

import re
import textwrap

from attrs import frozen

PYTHON = ("python", "py", "python3")
LONGEST = 100_000
"""Largest length of a program in characters."""
MARGIN = 3
"""Largest extra indentation of a closing fence; fences in docstrings are indented more."""

_FENCE = re.compile(r"([^`]*+)(`{3,}+)([^`]*+)")
_LANGUAGE = re.compile(r"[\w+#-]*")
_ITEM = " \t-*+.)0123456789"
"""Characters of a list marker, which indents the text after it."""


@frozen
class _Fence:
    """An opening fence."""

    marks: str
    indent: int
    language: str

    def ends(self, line: str) -> bool:
        """Whether the line closes the block; text may follow the fence."""
        text = line.lstrip(" \t")
        return text.startswith(self.marks) and len(line) - len(text) <= self.indent + MARGIN


def program_of(reply: str) -> str | None:
    """Return the last block of Python, else the last block without a language; None if it cannot be run.

    An unclosed block counts, because a token limit may have cut it off.
    """
    blocks = blocks_of(reply)
    programs = [text for language, text in blocks if language in PYTHON] or [
        text for language, text in blocks if not language
    ]
    return programs[-1] if programs and len(programs[-1]) <= LONGEST else None


def blocks_of(reply: str) -> list[tuple[str, str]]:
    """Return language (in lower case) and text of each block; an empty unclosed block is ignored."""
    found: list[tuple[str, str]] = []
    opened, lines = None, list[str]()
    for line in [*reply.replace("\r\n", "\n").split("\n"), None]:
        if opened is None:
            opened = None if line is None else _opened(line)
        elif line is None or opened.ends(line):
            text = "\n".join(lines)
            if line is not None or text.strip():
                # only if the block is indented, as in a list item: dedent empties blank lines
                plain = textwrap.dedent(text) if text.lstrip("\n")[:1].isspace() else text
                found.append((opened.language, plain))
            opened, lines = None if line is None else _opened_after(line), []
        else:
            lines.append(line)
    return found


def _opened(line: str) -> _Fence | None:
    """Return the opening fence in a line, or None.

    Text before the fence is allowed, as in "So: ```python", if only a language follows.
    """
    parts = _FENCE.fullmatch(line)
    if parts is None:
        return None
    before, marks, after = parts.groups()
    if before.strip() and re.search(r"\s\S", after):
        return None
    language = _LANGUAGE.match(after.strip())
    indent = len(before) - len(before.lstrip(_ITEM))
    return _Fence(marks, indent, language[0].lower() if language else "")


def _opened_after(line: str) -> _Fence | None:
    """Return the opening fence in a line that closes a block, as in "``` and ```py" or "```bash"."""
    rest = line.lstrip(" \t").lstrip("`")
    if "`" in rest:
        return _opened(rest)
    return _opened(line) if re.match(r"\w\S*\s*$", rest) else None
