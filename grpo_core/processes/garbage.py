"""When the garbage collector of a process runs.

Libraries make a million objects that live as long as the process.  Scanning them repeatedly takes a sixth of
the time of the imports, and later 0.1 s each time.
"""

from __future__ import annotations

import gc

_RARELY = 50_000
"""New objects after which the collector runs; many modules make more than Python's 700."""
_usual: tuple[int, int, int] | None = None


def collect_rarely() -> None:
    """Let the collector run rarely until ``spare_the_collector``, for the imports of libraries."""
    global _usual
    _usual = _usual or gc.get_threshold()
    gc.set_threshold(_RARELY, *_usual[1:])


def spare_the_collector() -> None:
    """Exempt the current objects from collection, and collect new ones as usual."""
    global _usual
    gc.collect()
    gc.freeze()
    if _usual is not None:
        gc.set_threshold(*_usual)
        _usual = None
