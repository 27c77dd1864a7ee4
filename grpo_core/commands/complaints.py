"""Prints errors on the command line: one message, and a traceback only for our own bugs."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import resource
import sys
import sysconfig
from collections.abc import Iterator
from importlib.machinery import PathFinder
from traceback import walk_tb
from typing import Any, TextIO

from grpo_core.contracts.errors import one_line, out_of_memory, shortened, traceback_of, with_place
from grpo_core.processes.secrets import inert

LONGEST_ERROR = 6_000
"""Largest number of characters printed of an error."""
NEXT = "next: "
"""Begin of a line with a command to run next."""


def unexpected(error: Exception) -> str:
    """Return one line if memory ran out, wherever a library noticed it, otherwise the traceback.

    The notes of the error follow: they say what was saved.
    """
    if (cause := out_of_memory(error)) is None:
        return hidden(error) or traceback_of(error)
    why = f" ({one_line(cause)})" if str(cause) else ""
    return "\n".join([f"grpo-core: out of memory{why}: {_memory_limit()}", *getattr(error, "__notes__", [])])


def hidden(error: BaseException) -> str:
    """Return a line about a module in front of an installed one of the same name, or ""."""
    frames = [frame.f_globals for frame, _ in walk_tb(error.__traceback__)]
    loaded = [vars(module) for name, module in sys.modules.copy().items() if "." not in name]
    places = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    for module in (*frames, *loaded):
        name, file = str(module.get("__name__")).partition(".")[0], str(module.get("__file__") or "")
        if not file or file.startswith(tuple(places)):
            continue
        meant = PathFinder.find_spec(name, places)
        if meant is not None and meant.origin not in (None, file) and meant.loader is not None:
            return (
                f"grpo-core: {file} hides the installed module {name!r}: rename it, or take its directory "
                f"from PYTHONPATH ({with_place(error.__cause__ or error)})"
            )
    return ""


def _memory_limit() -> str:
    """Return the memory limit of this process, and a remedy."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return "this machine or container has no memory left; end other programs, or give it more"
    return f"this process may use {most // 2**20:,} MiB of address space (ulimit -v); raise the limit"


def say(text: str) -> None:
    """Print a line of a command's result and flush; it may quote a model or a plugin."""
    _print(text, sys.stdout)


def complain(text: str) -> None:
    """Print an error; it may quote a model's output in full."""
    _print(shortened(text, LONGEST_ERROR), sys.stderr)


def _print(text: str, file: TextIO) -> None:
    """Print lines: on a terminal they are wrapped at words, except commands, which are copied."""
    if not file.isatty():
        print(inert(text), file=file, flush=True)
        return
    from rich.console import Console

    from grpo_core.reporting.terminal import write

    console = Console(file=file)
    for line in text.split("\n"):
        write(console, line, wrap=not line.startswith(NEXT))


class _Terminal(io.FileIO):
    """A terminal.  Output after it was closed is dropped: the program may have work to save."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def outlive_terminal() -> None:
    """Let standard output and standard error survive the end of their terminal."""
    sys.stdout, sys.stderr = (
        io.TextIOWrapper(
            io.BufferedWriter(_Terminal(stream.fileno(), "wb", closefd=False)),
            stream.encoding,
            stream.errors,
            line_buffering=True,
        )
        if stream.isatty()
        else stream
        for stream in (sys.stdout, sys.stderr)
    )


@contextlib.contextmanager
def to_a_reader() -> Iterator[None]:
    """Drop printed text when standard output has no reader, as after ``| head`` or a lost ssh connection."""
    try:
        yield
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Drop all further output, and Python's unflushed output."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_log_inert() -> None:
    """Escape hostile text, and hide secrets, in warnings that no configured handler prints."""

    class Inert(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return inert(super().format(record))

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Inert())
