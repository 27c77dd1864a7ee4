"""Tells plugins of events, on a thread for each: one that hangs or fails holds nobody up but itself."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from grpo_core.events import Event

BACKLOG = 10_000
"""Events that may wait for a plugin."""

PATIENCE = 10.0
"""Seconds that the end of a run waits for a plugin to hear the rest."""

log = logging.getLogger(__name__)


class Audience:
    """One plugin's listeners: called with one event after another, in order.

    They are not called again once one has raised, or when the plugin is ``BACKLOG`` events behind; which is
    said once, in the log.

    Args:
        who: how messages call them.
    """

    def __init__(self, who: str, listeners: Sequence[Callable[[Event], Any]]) -> None:
        self._who, self._listeners = who, listeners
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._hearing = "no event yet"
        """The event that they are called with."""
        self._left = False
        self._thread = threading.Thread(target=self._listen, name=who, daemon=True)
        self._thread.start()

    def tell(self, event: Event) -> None:
        if self._left:
            return
        if self._events.qsize() >= BACKLOG:
            self._left = True
            log.warning(
                "%s is %d events behind, in %s; it is not called again", self._who, BACKLOG, self._hearing
            )
            return
        self._events.put(event)

    def end(self) -> None:
        """There will be no other event."""
        self._events.put(None)

    def join(self) -> None:
        """Wait until they have heard everything, but no longer than ``PATIENCE``."""
        self._thread.join(0 if self._left else PATIENCE)
        if self._thread.is_alive() and not self._left:
            log.warning(
                "%s has not returned from %s for %g s; it is left behind", self._who, self._hearing, PATIENCE
            )

    def _listen(self) -> None:
        while (event := self._events.get()) is not None:
            self._hearing = type(event).__name__
            try:
                for listener in self._listeners:
                    listener(event)
            except Exception:
                log.warning(
                    "%s raised on %s; it is not called again", self._who, self._hearing, exc_info=True
                )
                self._left = True
                return
