"""Runs commands in a sandbox, one after another, on the same files.

Each command has a sandbox of its own.  The files, the working directory, and the exported variables go from
one to the next; no process of a command, and no memory, lasts longer than the command.  The files are kept
packed, and are never unpacked outside.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import io
import json
import platform
import signal
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import evolve, field, frozen

import grpo_core as grpo
from grpo_plugin_code.images import Image
from grpo_plugin_code.sandbox import MIB, Job, Limits, Sandboxes
from grpo_plugin_code.values import WRONG, text_in

PAGE = 4096
"""Bytes in which memory is given to files."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""Where an image that does not say it has its programs."""
TOLD, TEXTS = 8, 4
"""Characters of JSON in JSON that a byte of output takes at most, and number of texts that a result has."""
STATE = 65_536
"""Bytes that the working directory and the exported variables may take; Linux allows some megabytes."""
GRACE = 15.0
"""Seconds that unpacking and packing the files may take."""


@frozen(kw_only=True)
class Ran:
    """The end of a command."""

    status: int | None
    """Its exit status; None if its time was over, or if it ended the sandbox."""
    output: str
    tree: str
    """The files after it, packed; those before it if they could not be read."""
    files: Mapping[str, str] = field(factory=dict)
    """The files outside of its directory that were asked for, as far as there are any."""
    lost: str = ""
    """Why the sandbox ended without telling anything."""
    state: str = ""
    """The working directory and the exported variables after it, for bash."""
    full: bool = False
    """Whether its files were too large to be kept."""

    @property
    def cut(self) -> str:
        """Return "time" or "killed" if the command did not end by itself, else an empty text.

        A command that prints too much has "time", too: it is ended in the same way.
        """
        if self.lost:
            return "killed"
        if self.status is None:
            return "time"
        return "killed" if self.status < 0 or 128 < self.status <= 128 + signal.SIGRTMAX else ""


class Commands:
    """Runs commands.

    Args:
        limits: of each command.
        place: absolute path of the directory that they work in.
        others: further directories that they may write to; nothing is kept of them.
        at_once: number of commands that run at once, or a semaphore that others share.
        ready: number of sandboxes that are started ahead.
        image: the system of the commands, in place of this machine's.

    Raises ConfigError if there is no sandbox on this machine, or if its Python cannot keep files.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        place: str,
        others: Sequence[str] = (),
        at_once: int | asyncio.Semaphore,
        ready: int,
        image: Image | None = None,
    ) -> None:
        if not hasattr(tarfile, "tar_filter"):  # Python 3.11.4 brought it; the sandbox's Python is this one
            raise grpo.ConfigError(
                f"code: this Python is {platform.python_version()}, whose tarfile cannot refuse paths that "
                "lead out of a directory; use 3.11.4 or newer"
            )
        self._limits, self._place, self._others = limits, place, tuple(others)
        self._environ = {"PATH": PATH, **image.environ} if image is not None else {}
        packed = limits.files * 1024 * 4 // 3 + 1024  # base64 of all files, where nothing can be compressed
        output = TOLD * (TEXTS * limits.output + STATE // 1024) + packed
        wide = evolve(limits, seconds=limits.seconds + GRACE, output=output)
        places = [each for each in (place, *self._others) if each != "/tmp"]
        self._sandboxes = Sandboxes(wide, at_once=at_once, ready=ready, places=places, image=image)

    async def run(
        self,
        command: str,
        tree: str,
        *,
        state: str | None = None,
        others: Mapping[str, str] | None = None,
        reads: Sequence[str] = (),
        keeps: bool = True,
        seconds: float = 0.0,
    ) -> Ran:
        """Run a command on files.

        Args:
            command: for bash.
            tree: the files, packed.
            state: of the command before it, empty for the first; None if this command has none.
            others: packed files for the other directories, which are emptied first.
            reads: files that are read after it.
            keeps: whether the files after it are wanted.
            seconds: its time limit, if that is shorter than the limit of all.
        """
        limit = min(seconds or self._limits.seconds, self._limits.seconds)
        job = {
            "command": command,
            "place": self._place,
            "environ": self._environ,
            "tree": tree,
            "state": state,
            "state_size": STATE,
            "others": {place: (others or {}).get(place, "") for place in self._others},
            "reads": list(reads),
            "keeps": keeps,
            "seconds": limit,
            "space": self._limits.files * MIB,
            "output": self._limits.output * 1024,
        }
        outcome = await self._sandboxes.run(
            Job(code=_program(), stdin=json.dumps(job), calls=["told", "tree"], seconds=limit + GRACE)
        )
        try:
            return self._ran(outcome.values, tree, 1 + len(reads), state=state, keeps=keeps)
        except WRONG:  # it may also tell what is no result
            return Ran(
                status=None, output="", tree=tree, state=state or "", lost=outcome.told or "it told nothing"
            )

    def _ran(self, values: Sequence[str], tree: str, texts: int, *, state: str | None, keeps: bool) -> Ran:
        """Read what a sandbox tells: how the command ended, with so many texts, and its files.

        Raises one of ``WRONG`` if it tells something else, or more than these texts can take.
        """
        most = TOLD * (1024 * self._limits.output * texts + STATE) + PAGE
        if len(values[0]) > most:
            raise ValueError(f"it told {len(values[0])} characters; at most {most} are read")
        found = json.loads(text_in(values[0]))
        full = keeps and bool(found["full"])
        return Ran(
            status=None if found["status"] is None else int(found["status"]),
            output=str(found["output"]),
            tree=text_in(values[1]) if keeps and not full else tree,
            files={str(path): str(text) for path, text in dict(found["files"]).items()},
            state="" if state is None else str(found["state"]),
            full=full,
        )

    async def aclose(self) -> None:
        await self._sandboxes.aclose()


def packed(files: Mapping[str, str | bytes]) -> str:
    """Pack texts by their paths.  Raises PluginError for a path that is none within a directory."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        for name, content in files.items():
            if not name or name.startswith("/") or ".." in Path(name).parts:
                raise grpo.PluginError(f"code: {name!r} is not a path of a file within the working directory")
            data = content.encode() if isinstance(content, str) else content
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(data), 0o755
            tar.addfile(entry, io.BytesIO(data))
    return _text(whole)


def packed_directory(directory: Path) -> str:
    """Pack the files of a directory; of a directory that is not there, nothing."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        if directory.is_dir():
            tar.add(directory, arcname=".")
    return _text(whole)


def room_of(tree: str) -> int:
    """Return the bytes that packed files take in a sandbox."""
    if not tree:
        return 0
    with tarfile.open(fileobj=io.BytesIO(zlib.decompress(base64.b64decode(tree)))) as tar:
        return sum(-(-entry.size // PAGE) * PAGE for entry in tar)


def _text(whole: io.BytesIO) -> str:
    return base64.b64encode(zlib.compress(whole.getvalue(), 1)).decode()


@functools.cache
def _program() -> str:
    return Path(__file__).with_name("inside_shell.py").read_text()
