"""When the garbage collector of a process looks at its objects.

Libraries make a million objects that live as long as the process.  To look at them again and again while
they are imported takes a sixth of the import, and afterwards 0.1 s each time.
"""

from __future__ import annotations

import gc

_RARELY = 50_000
"""New objects after which the collector runs; Python's 700 are fewer than many a module makes."""
_usual: tuple[int, int, int] | None = None


def collect_rarely() -> None:
    """Let the collector run rarely until ``spare_the_collector``, as libraries will be imported now."""
    global _usual
    _usual = _usual or gc.get_threshold()
    gc.set_threshold(_RARELY, *_usual[1:])


def spare_the_collector() -> None:
    """Let the collector pass over what lives now, and look at new objects as often as usual."""
    global _usual
    gc.collect()
    gc.freeze()
    if _usual is not None:
        gc.set_threshold(*_usual)
        _usual = None
