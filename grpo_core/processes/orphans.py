"""Ends the descendants of a process, even after SIGKILL of the process itself.

Each child has a unique environment variable, its mark, which all its descendants inherit, in any group or
session.  Linux shows the variables of a process, so the processes with a mark can be found.

A process with children also has a watcher: a program that waits for the end of the process, kills the
processes that still have one of its marks, removes its remaining temporary directories, and exits.  The
watcher is this file, run with only the standard library: it needs a few megabytes and no CPU time.  It leads
a separate group, and blocks the signals by which a terminal or a scheduler ends a run.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

MARK = "GRPO_CORE_CHILD"
"""Environment variable with ``SECRET.NUMBER``: the parent process, and the number of the child."""
PROGRAM = "GRPO_CORE_PROGRAM"
"""Environment variable of programs that a child starts and ends itself; they keep the child's mark."""

_DIRECTORY = "grpo-core-"
"""Prefix of the names of temporary directories, before the secret of their process."""
_MOST = 10
"""Scans in a row that may find something before a mark is given up."""
_SCANS = 3
"""Empty scans in a row before a watcher ends: a program may be starting another one."""
_PAUSE = 0.1
"""Seconds between two scans."""
_BECOMING = 1.0
"""Seconds to wait for the variables of a new process to appear in /proc."""
_PATIENCE = 60.0
"""Seconds until a watcher gives up: the kernel keeps a process that waits for a broken device."""


class Marks:
    """Makes the marks of this process's children, and starts its watcher with the first one."""

    def __init__(self) -> None:
        self._owner = 0
        self._secret = ""
        self._number = 0

    def make(self) -> str:
        """Return a unique mark for a child."""
        self._begin()
        self._number += 1
        return f"{self._secret}.{self._number}"

    def directory(self) -> tempfile.TemporaryDirectory[str]:
        """Make a temporary directory; the watcher removes it if this process is killed first."""
        self._begin()
        return tempfile.TemporaryDirectory(prefix=f"{_DIRECTORY}{self._secret}-")

    def _begin(self) -> None:
        if self._owner != os.getpid():  # after a fork, the watcher belongs to the original process
            self._owner, self._secret = os.getpid(), os.urandom(16).hex()
            if sys.platform == "linux":
                _start_watcher(self._secret)


def end_marked(mark: str, *, name: str = MARK) -> None:
    """Kill the processes with a mark until none is left; they may start others meanwhile."""
    for _ in range(_MOST):
        if not kill_marked(mark, name=name):
            return


def kill_marked(mark: str, *, name: str = MARK) -> int:
    """Send SIGKILL to the processes with a mark, or with any mark of this prefix if it ends in a dot.

    Returns the number of processes found.
    """
    wanted = f"{name}={mark}".encode()
    found = 0
    for pid, variables in _environments():
        if any(each.startswith(wanted) if mark.endswith(".") else each == wanted for each in variables):
            found += 1
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    return found


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    """Yield the processes of this user with their initial environment variables (Linux only)."""
    for name in os.listdir("/proc") if sys.platform == "linux" else []:
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
                yield int(name), variables(int(name)).split(b"\0")


def variables(pid: int) -> bytes:
    """Return a process's initial environment; wait for one in the middle of ``exec``.

    The kernel shows neither its variables nor its arguments before its new stack exists, which ``Popen`` does
    not wait for.  Raises OSError.
    """
    process = Path(f"/proc/{pid}")
    until = time.monotonic() + _BECOMING
    while True:
        has_begun = bool((process / "cmdline").read_bytes())  # before its variables, which appear with it
        found = (process / "environ").read_bytes()
        if found or has_begun or time.monotonic() > until:
            return found
        if (process / "statm").read_bytes().startswith(b"0 "):  # of the kernel, or it has ended
            return found
        time.sleep(0.001)


def _start_watcher(secret: str) -> None:
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-I", "-S", __file__, str(os.getpid()), secret],
        {name: value for name, value in os.environ.items() if name != MARK},  # no other watcher ends it
        file_actions=[(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in range(3)],
        setpgroup=0,
        setsigmask=[signal.SIGINT, signal.SIGTERM, signal.SIGHUP],
    )


def watch(parent: int, secret: str) -> None:
    """Wait for the parent's end; kill the processes with its marks, and remove its temporary files."""
    os.closerange(3, 1024)
    os.chdir("/")
    try:
        ended = [os.pidfd_open(parent)]
    except OSError:  # an old kernel, or a sandbox that refuses the call
        ended = []
    while os.getppid() == parent:
        select.select(ended, [], [], 1.0)
    give_up, quiet = time.monotonic() + _PATIENCE, 0
    while quiet < _SCANS and time.monotonic() < give_up:
        quiet = 0 if kill_marked(f"{secret}.") else quiet + 1
        time.sleep(_PAUSE)
    with os.scandir(tempfile.gettempdir()) as entries:
        left = [entry for entry in entries if entry.name.startswith(f"{_DIRECTORY}{secret}-")]
    for entry in left:
        if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
            shutil.rmtree(entry.path, ignore_errors=True)


if __name__ == "__main__":
    watch(int(sys.argv[1]), sys.argv[2])
