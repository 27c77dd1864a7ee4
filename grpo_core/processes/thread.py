"""A thread in place of a child process, for objects that exist only in this process.

It has the interface of a ``Child``: the same calls over the same kind of socket, so that nothing is shared by
accident.  A thread gives no protection: code that hangs is abandoned on its daemon thread at its deadline,
and code that crashes takes the process with it.
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Protocol

from grpo_core.processes.child import Child, Running
from grpo_core.processes.interpreters import Interpreter
from grpo_core.processes.served import Connection


class Target(Protocol):
    """The object that answers the calls."""

    def description(self) -> object: ...
    def serve(self, connection: Connection) -> None: ...
    def release(self) -> None:
        """Free its resources in this process; the last call."""


class ThreadChild(Child):
    """A ``Child`` whose target lives on a thread of this process.

    Args:
        make: makes the target, on that thread.
        name: name of the child in messages.
    """

    def __init__(self, make: Callable[[], Target], *, name: str) -> None:
        self._make = make
        super().__init__("", name=name)

    def _launch(
        self, theirs: socket.socket, environ: Mapping[str, str], interpreter: Interpreter | None
    ) -> Running:
        return _Serving(theirs.dup(), self._make, self.name)

    def _kill_group(self) -> None:
        """Do nothing: a thread has no process group."""


class _Serving:
    """A thread with the interface of ``subprocess.Popen``."""

    def __init__(self, connection: socket.socket, make: Callable[[], Target], name: str) -> None:
        self.pid = os.getpid()
        self.returncode: int | None = None
        self._ended = threading.Event()
        threading.Thread(target=self._serve, args=(connection, make), name=name, daemon=True).start()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("a thread", timeout or 0.0)
        return self.returncode or 0

    def kill(self) -> None:
        """Abandon the thread: it ends when its code returns, since the other end closes the socket."""
        self._end(1)

    def _end(self, code: int) -> None:
        if self.returncode is None:
            self.returncode = code
        self._ended.set()

    def _serve(self, sock: socket.socket, make: Callable[[], Target]) -> None:
        code, connection = 0, Connection(sock)
        try:
            connection.receive()
            try:
                target = make()
                description = target.description()
            except BaseException as error:
                connection.fail(0, error)
                return
            connection.reply(0, description)
            try:
                target.serve(connection)
            finally:
                target.release()
        except (EOFError, OSError):  # the other end is gone
            pass
        except BaseException:
            traceback.print_exc()
            code = 1
        finally:
            sock.close()
            self._end(code)
