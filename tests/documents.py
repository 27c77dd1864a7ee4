"""The code blocks and commands of the documents, for the tests that run them."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterator
from pathlib import Path

from attrs import frozen

ROOT = Path(__file__).parent.parent

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "ARCHITECTURE.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted(ROOT.glob("plugins/*/README.md")),
]

TUTORIALS = [
    ROOT / "docs" / f"{name}.md"
    for name in (
        "first-run",
        "tutorial",
        "multi-turn",
        "tools",
        "first-agent",
        "hosted",
        "hints",
        "several-tasks",
        "first-dataloader",
        "first-sampler",
        "real-model",
        "one-gpu",
        "tinker",
        "first-cluster",
        "from-trl",
        "from-verifiers",
    )
]
"""Pages that a reader follows from the first line to the last one; test_tutorial.py does."""

PROGRAMS = (
    "grpo-core",
    "make",
    "pip",
    "python",
    "pytest",
    "git",
    "source",
    "ray",
    "vllm",
    "cd",
    "mkdir",
    "twine",
)
"""The beginnings of lines of an indented block that are commands."""


@frozen
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str
    """Name of the file that the block shows, if it says so."""
    text: str

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


@frozen
class Command:
    """A command that the reader of a page types."""

    page: Path
    line: int
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """The first word that sets no variable."""
        return next(word for word in self.words if not re.match(r"\w+=", word))

    def __str__(self) -> str:
        return shlex.join(self.words)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, *languages: str) -> Iterator[Block]:
    """The fenced blocks of a page, in order; those of the languages if any are given."""
    text = page.read_text(encoding="utf-8")
    for found in re.finditer(r"^( *)```(\w*)([^\n]*)\n(.*?)^\1```$", text, re.S | re.M):
        _, language, attributes, body = found.groups()
        if languages and language not in languages:
            continue
        body = textwrap.dedent(body)
        named = re.search(r'title="([^"]+)"', attributes) or re.match(r"# ([\w./-]+\.\w+)\n", body)
        line = text.count("\n", 0, found.start()) + 1
        yield Block(page, line, language, named[1] if named else "", body)


def commands(page: Path) -> Iterator[Command]:
    """The commands of a page, in order: of its bash blocks, and of its indented blocks."""
    text = page.read_text(encoding="utf-8")
    bash = {block.line: block for block in blocks(page, "bash")}
    lines = text.splitlines()
    inside = False
    for number, line in enumerate(lines, start=1):
        if number in bash:
            yield from _split(page, number, bash[number].text)
        if re.match(r" *```", line):
            inside = not inside
        elif not inside and re.match(rf" {{4}}(?:\w+=\S+ )*(?:{'|'.join(PROGRAMS)})\b", line):
            whole, following = line, number
            while whole.endswith("\\"):
                whole, following = whole[:-1] + lines[following].strip(), following + 1
            yield from _split(page, number, whole)


def _split(page: Path, line: int, text: str) -> Iterator[Command]:
    for whole in text.replace("\\\n", " ").splitlines():
        words = shlex.split(whole, comments=True)
        while words:
            end = words.index("&&") if "&&" in words else len(words)
            if words[:end]:
                yield Command(page, line, tuple(words[:end]))
            words = words[end + 1 :]
