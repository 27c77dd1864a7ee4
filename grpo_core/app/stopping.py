"""Ends a run on a signal or at the program's request."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial

from grpo_core.loop.pipeline import Pipeline
from grpo_core.processes.interrupts import handle, received


class Stop:
    """Ends a run on request, from any thread: after its step with a checkpoint, the second time at once."""

    def __init__(self) -> None:
        self._ask: Callable[[], object] | None = None
        self._asked = 0
        """Number of requests not yet handled."""
        self._lock = threading.RLock()  # a signal handler may interrupt itself

    def __call__(self) -> None:
        """Request the end."""
        with self._lock:
            if self._ask is not None:
                self._ask()
            else:
                self._asked += 1

    @contextlib.contextmanager
    def heard(self, ask: Callable[[], object]) -> Iterator[None]:
        """Call ``ask`` in the running event loop for each request, earlier ones included."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._ask = partial(loop.call_soon_threadsafe, ask)
            for _ in range(self._asked):
                self._ask()
            self._asked = 0
        try:
            yield
        finally:
            self._ask = None


@contextlib.contextmanager
def interruptions(status: Callable[[str], None], stop: Stop) -> Iterator[Callable[[Pipeline], None]]:
    """End the run on a signal and on ``stop``: after its step once its pipeline is known, else at once.

    A second one ends it at once, unless one of them is SIGHUP: a terminal that is closed may send it twice,
    and a session that ends sends SIGTERM with it.  Yields a function that takes the pipeline.
    """
    loop = asyncio.get_running_loop()
    main = asyncio.current_task()
    assert main is not None
    running: list[Pipeline] = []
    asked: list[str] = []

    def end(why: str) -> None:
        asked.append(why)
        again = len(asked) > 1
        if again and (why == "SIGHUP" or set(asked[:-1]) == {"SIGHUP"}):
            return
        if again or not running:
            main.cancel()
            return
        when = "after this step" if running[0].in_step else "now"
        status(f"{why}: ending {when}, with a checkpoint (again: end at once)")
        running[0].stop()

    def take(pipeline: Pipeline) -> None:
        running.append(pipeline)
        handle()  # a library imported meanwhile may have installed its own handlers

    def receive(name: str) -> None:
        loop.call_soon_threadsafe(end, name)

    with stop.heard(partial(end, "interrupted")), received(receive):
        yield take
