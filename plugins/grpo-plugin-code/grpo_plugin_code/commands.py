"""Runs a sequence of commands on the same files, each in a new sandbox.

Files, working directory and exported variables are passed from one command to the next; processes and memory
end with the command.  The files stay packed and are never unpacked outside of a sandbox.
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
"""Page size: the unit in which files take memory."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""PATH for images without one."""
ESCAPED, TEXTS = 8, 4
"""Largest number of characters for a byte of output in nested JSON, and number of texts in a result."""
STATE = 65_536
"""Largest size of working directory and exported variables in bytes; Linux allows some megabytes."""
GRACE = 15.0
"""Seconds for unpacking and packing the files."""


@frozen(kw_only=True)
class Ran:
    """The result of a command."""

    status: int | None
    """Exit status; None after a timeout, or if the command ended the sandbox."""
    output: str
    tree: str
    """Packed files after the command; the files before it if they could not be read."""
    files: Mapping[str, str] = field(factory=dict)
    """Contents of the requested files outside of the directory, by path; missing files are absent."""
    lost: str = ""
    """Reason why the sandbox ended without a result."""
    state: str = ""
    """Working directory and exported variables after the command, as bash code."""
    full: bool = False
    """Whether the files were too large to keep."""

    @property
    def stopped_by(self) -> str:
        """The text "time" or "killed" if the command did not end by itself, else an empty text.

        Too much output counts as "time", because it ends a command in the same way.
        """
        if self.lost:
            return "killed"
        if self.status is None:
            return "time"
        return "killed" if self.status < 0 or 128 < self.status <= 128 + signal.SIGRTMAX else ""


class Commands:
    """Runs commands in sandboxes.

    Args:
        limits: limits of each command.
        directory: absolute path of the working directory.
        others: further writable directories, whose contents are dropped.
        at_once: number of concurrent commands, or a shared semaphore.
        ready: number of sandboxes that are started ahead.
        image: root file system of the commands; None uses this machine's.

    Raises ConfigError if sandboxes do not work on this machine, or its Python lacks ``tarfile.tar_filter``.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        directory: str,
        others: Sequence[str] = (),
        at_once: int | asyncio.Semaphore,
        ready: int,
        image: Image | None = None,
    ) -> None:
        if not hasattr(tarfile, "tar_filter"):  # new in Python 3.11.4; sandboxes run this Python
            raise grpo.ConfigError(
                f"code: this Python is {platform.python_version()}, whose tarfile cannot refuse paths that "
                "lead out of a directory; use 3.11.4 or newer"
            )
        self._limits, self._directory, self._others = limits, directory, tuple(others)
        self._environ = {"PATH": PATH, **image.environ} if image is not None else {}
        packed = limits.files * 1024 * 4 // 3 + 1024  # base64 of incompressible files
        output = ESCAPED * (TEXTS * limits.output + STATE // 1024) + packed
        wide = evolve(limits, seconds=limits.seconds + GRACE, output=output)
        mounts = [each for each in (directory, *self._others) if each != "/tmp"]
        self._sandboxes = Sandboxes(wide, at_once=at_once, ready=ready, mounts=mounts, image=image)

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
            command: bash code.
            tree: the packed files.
            state: ``Ran.state`` of the previous command, empty for the first; None runs without state.
            others: packed files for the other directories, which are emptied first.
            reads: paths of files to read after the command.
            keeps: whether to return the files.
            seconds: time limit, if it is shorter than the limit of all commands.
        """
        limit = min(seconds or self._limits.seconds, self._limits.seconds)
        job = {
            "command": command,
            "directory": self._directory,
            "environ": self._environ,
            "tree": tree,
            "state": state,
            "state_size": STATE,
            "others": {directory: (others or {}).get(directory, "") for directory in self._others},
            "reads": list(reads),
            "keeps": keeps,
            "seconds": limit,
            "space": self._limits.files * MIB,
            "output": self._limits.output * 1024,
        }
        outcome = await self._sandboxes.run(
            Job(code=_program(), stdin=json.dumps(job), calls=["result", "tree"], seconds=limit + GRACE)
        )
        try:
            return self._ran(outcome.values, tree, 1 + len(reads), state=state, keeps=keeps)
        except WRONG:  # the code in the sandbox can forge any result
            return Ran(
                status=None,
                output="",
                tree=tree,
                state=state or "",
                lost=outcome.message or "it returned nothing",
            )

    def _ran(self, values: Sequence[str], tree: str, texts: int, *, state: str | None, keeps: bool) -> Ran:
        """Parse the result of a sandbox: status, at most ``texts`` texts, and packed files.

        Raises one of ``WRONG`` if it is invalid or too long.
        """
        most = ESCAPED * (1024 * self._limits.output * texts + STATE) + PAGE
        if len(values[0]) > most:
            raise ValueError(f"it returned {len(values[0])} characters; at most {most} are read")
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
    """Pack texts by path.  Raises PluginError for a path that leaves the directory."""
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
    """Pack the files of a directory; a missing directory gives an empty text."""
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w") as tar:
        if directory.is_dir():
            tar.add(directory, arcname=".")
    return _text(whole)


def room_of(tree: str) -> int:
    """Return the size in bytes of packed files in a sandbox."""
    if not tree:
        return 0
    with tarfile.open(fileobj=io.BytesIO(zlib.decompress(base64.b64decode(tree)))) as tar:
        return sum(-(-entry.size // PAGE) * PAGE for entry in tar)


def _text(whole: io.BytesIO) -> str:
    return base64.b64encode(zlib.compress(whole.getvalue(), 1)).decode()


@functools.cache
def _program() -> str:
    return Path(__file__).with_name("inside_shell.py").read_text()
