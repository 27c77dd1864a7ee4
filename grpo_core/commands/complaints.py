"""Prints what went wrong on the command line: one message, and a traceback only of a fault of ours."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import resource
import sys
from collections.abc import Iterator
from typing import Any

from grpo_core.contracts.errors import one_line, out_of_memory, shortened, traceback_of
from grpo_core.contracts.unicode import inert

LONGEST_ERROR = 6_000
"""Number of characters of an error that are printed."""


def unexpected(error: Exception) -> str:
    """Return one line if memory is missing, wherever a library noticed it, and else the traceback.

    The notes of the error follow: they say what was saved.
    """
    if (cause := out_of_memory(error)) is None:
        return traceback_of(error)
    why = f" ({one_line(cause)})" if str(cause) else ""
    return "\n".join([f"grpo-core: out of memory{why}: {_memory_limit()}", *getattr(error, "__notes__", [])])


def _memory_limit() -> str:
    """Return what limits the memory of this process, and what helps."""
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most == resource.RLIM_INFINITY:
        return "this machine or container has none left; end other programs, or give it more"
    return f"this process may use {most // 2**20:,} MiB of address space (ulimit -v); raise the limit"


def say(text: str) -> None:
    """Print a line of a command's result at once; it may quote what a model or a plugin said."""
    print(inert(text), flush=True)


def complain(text: str) -> None:
    """Print an error; it may quote what a model said, and all of it."""
    print(inert(shortened(text, LONGEST_ERROR)), file=sys.stderr)


class _Terminal(io.FileIO):
    """A terminal.  What is written after it was closed is dropped: the program may have work to save."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return len(data)


def outlive_terminal() -> None:
    """Let standard output and standard error outlive the terminal that they are."""
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
    """Drop all further output, and what Python has not flushed yet."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def make_log_inert() -> None:
    """Let warnings that no handler was configured for quote hostile text without doing what it says."""

    class Inert(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return inert(super().format(record))

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Inert())
