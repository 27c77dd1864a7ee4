"""Prints what went wrong on the command line: one message, and a traceback only of a fault of ours."""

from __future__ import annotations

import logging
import resource
import sys
import traceback

from grpo_core.errors import one_line, out_of_memory, shortened
from grpo_core.inert import inert

LONGEST_ERROR = 20_000
"""Number of characters of an error that are printed."""


def unexpected(error: Exception) -> str:
    """Return one line if memory is missing, wherever a library noticed it, and else the traceback."""
    if (cause := out_of_memory(error)) is None:
        return "".join(traceback.format_exception(error))
    told = f" ({one_line(cause)})" if str(cause) else ""
    return f"grpo-core: out of memory{told}: {_memory_limit()}"


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


def make_log_inert() -> None:
    """Let warnings that no handler was configured for quote hostile text without doing what it says."""

    class Inert(logging.Formatter):
        def format(self, record: logging.LogRecord) -> str:
            return inert(super().format(record))

    if logging.lastResort is not None:
        logging.lastResort.setFormatter(Inert())
