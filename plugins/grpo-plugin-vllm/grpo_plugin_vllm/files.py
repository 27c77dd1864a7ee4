"""Limits of open files, since each connection to a server takes one."""

from __future__ import annotations

import contextlib
import logging
import os
import resource

RESERVED = 64
"""Number of open files for the rest of the process: logs, checkpoints, pipes to children."""

log = logging.getLogger("grpo_core")


def connections(wanted: int, *, servers: int) -> int:
    """Return the number of connections for each server: ``wanted``, or fewer if open files are limited.

    The soft limit is raised towards the hard limit first, like ``ulimit -n``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        used = RESERVED + len(os.listdir("/dev/fd"))
    except OSError:  # no descriptor is left
        used = RESERVED + soft
    needed = used + wanted * servers
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    more = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    with contextlib.suppress(OSError, ValueError):  # some systems have a further limit below the hard one
        resource.setrlimit(resource.RLIMIT_NOFILE, (more, hard))
        soft = more
    if soft >= needed:
        return wanted
    possible = max(1, (soft - used) // servers)
    log.warning(
        "engine vllm:http: at most %d requests are at a server at the same time, not %d: this process may "
        "open %d files, and each request takes one; raise the limit with ulimit -Hn",
        possible,
        wanted,
        soft,
    )
    return possible
