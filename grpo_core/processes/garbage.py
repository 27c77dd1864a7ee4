"""When the garbage collector of a process runs.

Libraries make a million objects that live as long as the process.  Scanning them repeatedly takes a sixth of
the time of the imports, and later 0.1 s each time.  Rollouts in flight are many objects as well, and few of
them are in cycles: Python's own thresholds spend an eighth of the time of the loop on them, and a third with
100,000 in flight.
"""

from __future__ import annotations

import gc

_IMPORTING, _RUNNING = 50_000, 10_000
"""New objects after which the collector runs; many modules make more than Python's 700."""


def collect_rarely() -> None:
    """Let the collector run rarely, for the imports of libraries."""
    gc.set_threshold(_IMPORTING, *gc.get_threshold()[1:])


def spare_the_collector() -> None:
    """Exempt the current objects from collection, and collect new ones less often than Python does."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_RUNNING, *gc.get_threshold()[1:])
