"""The memory and the cores of a process, and when its garbage collector runs.  Needs no torch.

Libraries make a million objects that live as long as the process.  Scanning them repeatedly takes a sixth of
the time of the imports, and later 0.1 s each time.  Rollouts in flight are many objects as well, and few of
them are in cycles: Python's own thresholds spend an eighth of the time of the loop on them, and a third with
100,000 in flight.
"""

from __future__ import annotations

import gc
import os
import resource

_NEW_OBJECTS = 50_000
"""New objects after which the collector runs.  With 10,000, a rollout of the loop takes an eighth longer."""


def collect_rarely() -> None:
    """Let the collector run less often than Python does."""
    gc.set_threshold(_NEW_OBJECTS, *gc.get_threshold()[1:])


def spare_the_collector() -> None:
    """Exempt the current objects from collection, and collect new ones rarely."""
    gc.collect()
    gc.freeze()
    collect_rarely()


def thread_count(configured: int, colocated: bool, ranks: int = 1) -> int:
    """Return the number of a rank's torch threads: as configured, or for 0 its share of the cores.

    That is half of the cores if engines share them.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return configured or max(1, (cores // 2 if colocated else cores) // ranks)


def resident(process: int | str = "self") -> int:
    """Return the resident bytes of this process, or of another by its number; 0 if unknown."""
    try:
        with open(f"/proc/{process}/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, IndexError):  # there is no /proc, or the process has ended
        return 0
