"""Ends what the children of a process have started, also after the process itself was killed with SIGKILL.

Each child has an environment variable of its own, which all programs that descend from it inherit, in
whatever group or session they run.  Linux shows the variables of a process, so what has a child's mark can be
found.

A process that has children also has a watcher: a program that waits until the process has ended, kills what
still has one of its marks, removes the directories for temporary files that the process could not remove, and
ends.  The watcher is this file, run with nothing but the standard library: it
needs a few megabytes, and no time of a processor.  It leads a group of its own, and blocks the signals by
which a terminal or a scheduler ends a run.
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

MARK = "GRPO_CORE_CHILD"
"""Environment variable whose value is ``SECRET.NUMBER``: the process that has the child, and which child."""
PROGRAM = "GRPO_CORE_PROGRAM"
"""Environment variable of what a child starts and ends by itself; such a program keeps the child's mark."""

_DIRECTORY = "grpo-core-"
"""Names of directories for temporary files begin so, followed by the secret of the process that made them."""
_MOST = 10
"""Number of scans in a row that find something, after which a mark is given up."""
_SCANS = 3
"""Number of scans in a row that find nothing until a watcher ends: a program may be starting another one."""
_PAUSE = 0.1
"""Seconds between two scans."""
_BECOMING = 1.0
"""Seconds after which a process without variables and arguments is taken for one that has none."""
_PATIENCE = 60.0
"""Seconds after which a watcher gives up: the kernel keeps a process that waits for a broken device."""


class Marks:
    """Makes the marks of this process's children, and starts its watcher with the first one."""

    def __init__(self) -> None:
        self._owner = 0
        self._secret = ""
        self._number = 0

    def make(self) -> str:
        """Return a mark that no other child has."""
        self._begin()
        self._number += 1
        return f"{self._secret}.{self._number}"

    def directory(self) -> tempfile.TemporaryDirectory[str]:
        """Make a directory for temporary files; the watcher removes it if this process is killed first."""
        self._begin()
        return tempfile.TemporaryDirectory(prefix=f"{_DIRECTORY}{self._secret}-")

    def _begin(self) -> None:
        if self._owner != os.getpid():  # after a fork, the watcher is that of the process that has forked
            self._owner, self._secret = os.getpid(), os.urandom(16).hex()
            if sys.platform == "linux":
                _start_watcher(self._secret)


def end_marked(mark: str, *, name: str = MARK) -> None:
    """Kill what has inherited a mark until nothing is left; it may start others meanwhile."""
    for _ in range(_MOST):
        if not kill_marked(mark, name=name):
            return


def kill_marked(mark: str, *, name: str = MARK) -> int:
    """Send SIGKILL to what has inherited a mark, or any mark that begins so if it ends in a dot.

    Returns the number of processes that were found.
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
    """Yield the processes of this user with the environment variables that they began with (Linux only)."""
    for name in os.listdir("/proc") if sys.platform == "linux" else []:
        if name.isdecimal():
            with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
                yield int(name), variables(int(name)).split(b"\0")


def variables(pid: int) -> bytes:
    """Return the environment that a process began with; one that is just becoming a program is waited for.

    The kernel shows neither variables nor arguments of it until its new stack is there, which ``Popen`` does
    not wait for.  Raises OSError.
    """
    process = f"/proc/{pid}"
    until = time.monotonic() + _BECOMING
    while True:
        with open(f"{process}/cmdline", "rb") as file:
            has_begun = bool(file.read())  # before its variables are read, which come at the same moment
        with open(f"{process}/environ", "rb") as file:
            found = file.read()
        if found or has_begun or time.monotonic() > until:
            return found
        with open(f"{process}/statm", "rb") as file:
            if file.read().startswith(b"0 "):  # of the kernel, or it has ended and waits for its parent
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
    """Wait until the parent has ended; kill what has one of its marks, and remove its temporary files."""
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
