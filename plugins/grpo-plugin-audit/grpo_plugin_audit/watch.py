"""The child's side of an audit: it sees which files and sockets the environment's Python code touches.

A hook of ``sys.addaudithook`` sees what goes through the interpreter: ``open``, ``os.remove``,
``socket.connect`` and others.  It does not see native code, nor the programs that the environment starts.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

from attrs import define, field

from grpo_core.kit import EnvironmentHost

PHASES = ("phase", "kind", "what")
"""Keys of an event: "start" or "play"; "file", "socket" or "program"; the path or address."""
MOST = 1000
"""Number of different events that are kept."""
CHANGES = (
    "os.remove",
    "os.rename",
    "os.mkdir",
    "os.rmdir",
    "os.link",
    "os.symlink",
    "os.truncate",
    "shutil.move",
)
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


@define(eq=False)
class Watch:
    """Records events by phase: while the environment is made, and while it is played."""

    phase: Literal["start", "play"] = "start"
    seen: dict[tuple[str, str, str], None] = field(factory=dict)

    def hook(self, event: str, args: tuple[Any, ...]) -> None:
        """Receive an event of the interpreter.  It must not raise: the code that is watched would."""
        try:
            if event == "open":
                self._opened(*args)
            elif event in CHANGES:
                self._add("file", os.path.abspath(os.fsdecode(args[0])))
            elif event in ("socket.connect", "socket.bind"):
                self._add("socket", _address(args[1]))
            elif event == "subprocess.Popen":
                self._add("program", str(args[0]))
        except Exception:
            return

    def _opened(self, path: Any, mode: Any, flags: Any) -> None:
        if isinstance(path, str | bytes) and isinstance(flags, int) and flags & WRITES:
            name = os.path.abspath(os.fsdecode(path))
            if "__pycache__" not in name:
                self._add("file", name)

    def _add(self, kind: str, what: str) -> None:
        if len(self.seen) < MOST:
            self.seen[(self.phase, kind, what)] = None


def _address(given: Any) -> str:
    """Return an address as it is told; ports of this machine change from run to run."""
    name = str(given[0]) if isinstance(given, tuple) else str(given)
    local = name.startswith("127.") or name in ("::1", "localhost")
    return "loopback" if local else str(given)


class WatchedHost(EnvironmentHost):
    """An environment's host whose file and socket events are recorded."""

    def __init__(self, *args: Any, **options: Any) -> None:
        self._watch = Watch()
        sys.addaudithook(self._watch.hook)
        super().__init__(*args, **options)
        self._watch.phase = "play"

    def watched(self) -> list[dict[str, str]]:
        """Return the events so far."""
        return [dict(zip(PHASES, event, strict=True)) for event in list(self._watch.seen)]
