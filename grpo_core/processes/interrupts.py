"""Signals that end the program: ctrl-C, SIGTERM, and SIGHUP from a closed terminal.

The innermost receiver gets them.  Without one they raise KeyboardInterrupt.  A library may swallow it, so the
next receiver gets such a signal again.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

INTERRUPTED = 130
"""Exit status after one of these signals."""
LEAVING = 5.0
"""Seconds for threads and libraries to end when an interrupted program exits."""
PATIENCE = 30.0
"""Seconds for threads to end when any other program exits."""

OnSignal = Callable[[str], object]
"""Receives the name of a signal on the main thread, between any two instructions."""

_receivers: list[OnSignal] = []
_raised: list[str] = []
"""Signals that raised KeyboardInterrupt."""
_interrupted = False
"""Whether the program is exiting after a signal."""


def begin() -> None:
    """Handle the signals of a program that has just started."""
    # The first is called last.  Python kills itself if code of ``exec`` was interrupted.
    atexit.register(lambda: _interrupted and _end(INTERRUPTED))
    sys.unraisablehook = _raise_again
    handle()


def _raise_again(ignored: sys.UnraisableHookArgs) -> None:
    """Resend a signal whose KeyboardInterrupt Python swallowed, as in the callbacks of an import."""
    if not isinstance(ignored.exc_value, KeyboardInterrupt) or not _raised:
        sys.__unraisablehook__(ignored)
        return
    number = signal.Signals[_raised.pop()]
    again = threading.Timer(0.01, os.kill, [os.getpid(), number])  # when the callback has returned
    again.daemon = True
    again.start()


def handle() -> dict[signal.Signals, Any]:
    """Install the handlers, and return the previous ones; only the main thread can.

    SIGHUP stays ignored, as under ``nohup``.  SIGINT does not: shells ignore it for programs that a script
    starts with ``&``, and a sender of it to such a program means it.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    if before[signal.SIGHUP] is signal.SIG_IGN:
        del before[signal.SIGHUP]
    for number in [number for number, handler in before.items() if handler is None]:
        del before[number]  # Python did not install it, and cannot restore it
    for number in before:
        signal.signal(number, _receive)
    return before


def _receive(number: int, frame: object) -> None:
    name = signal.Signals(number).name
    if not _receivers:
        _raised.append(name)
        raise KeyboardInterrupt(name)
    _receivers[-1](name)


@contextlib.contextmanager
def received(receive: OnSignal) -> Iterator[None]:
    """Let a function receive the signals, on the main thread; elsewhere do nothing.

    The caller's handlers are restored afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = handle()
    _receivers.append(receive)
    try:
        while _raised:
            receive(_raised.pop())
        yield
    finally:
        _receivers.pop()
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(status: Any = INTERRUPTED) -> NoReturn:
    """Exit, even if a thread does not end, or a library after an interrupt."""
    global _interrupted
    _interrupted = status == INTERRUPTED
    watchdog = threading.Timer(LEAVING if _interrupted else PATIENCE, _end, [status])
    watchdog.daemon = True
    watchdog.start()
    if _interrupted:
        import logging  # imported late: ``begin`` is called before all else

        logging.disable()  # interrupted tasks are expected
    else:
        atexit.register(watchdog.cancel)  # the threads have ended then
    sys.exit(status)


def _end(status: Any) -> NoReturn:
    """End an exiting program at once, without what is still to be done."""
    if status != INTERRUPTED:
        threads = {thread.name for thread in threading.enumerate() if not thread.daemon} - {"MainThread"}
        print("grpo-core: ended, although threads still run:", ", ".join(sorted(threads)), file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(status if isinstance(status, int) else bool(status))  # as sys.exit() takes it
