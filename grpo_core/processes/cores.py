"""The cores and the memory of a process.  Needs no torch."""

from __future__ import annotations

import os
import resource


def thread_count(configured: int, colocated: bool, ranks: int = 1) -> int:
    """Return the number of a rank's torch threads: as configured, or for 0 its share of the cores.

    That is half of the cores if engines share them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return configured or max(1, (cores // 2 if colocated else cores) // ranks)


def resident() -> int:
    """Return the resident bytes of this process, or 0 if unknown."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0
