"""The child's side of a child process: its socket, its log, and the signals it leaves to its parent."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import io
import os
import pickle
import selectors
import signal
import socket
import struct
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from attrs import frozen

from grpo_core.contracts import errors
from grpo_core.processes.memory import collect_rarely, spare_the_collector
from grpo_core.text.credentials import NOTHING_HIDDEN, Mask

_PR_SET_PDEATHSIG = 1
LENGTH = struct.Struct("<Q")


@frozen
class Call:
    """A call from the parent."""

    id: int
    method: str
    args: tuple[Any, ...]


@frozen
class Answer:
    """The child's answer: a result, or an error with the child's traceback."""

    id: int
    result: Any = None
    error: BaseException | None = None
    traceback: str = ""
    fault: errors.Fault | None = None
    """The error as a record; an error that is no GrpoError cannot carry it."""


def framed(message: Call | Answer) -> bytes:
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return LENGTH.pack(len(body)) + body


class RemoteTraceback(Exception):  # noqa: N818
    """The traceback of a child, shown as the cause of the error in the parent; carries its fault."""

    def __init__(self, text: str, fault: errors.Fault | None = None) -> None:
        super().__init__(text)
        self.fault = fault


LONGEST_ERROR = 4000
"""Largest number of characters of an error's message sent to the parent."""
MOST_KEPT, LONGEST_KEPT = 10, 1_000_000
"""Number of longer errors that a child writes to its log, and characters of each."""


class Connection:
    """The child's side of the socket: receives calls and sends answers.

    Args:
        sock: the socket to the parent.
        own_errors_only: whether to send foreign errors as a CodeError, because the parent may not have their
            classes.

    Attributes:
        mask: hides secrets in errors.
        log: receives errors that are too long to send; it masks secrets itself.
    """

    def __init__(self, sock: socket.socket, *, own_errors_only: bool = False) -> None:
        self.mask = NOTHING_HIDDEN
        self.log: TextIO | None = None
        self._kept = 0
        """Number of errors written to it."""
        self._socket = sock
        self.own_errors_only = own_errors_only
        self._sending = threading.Lock()
        self._selector = selectors.DefaultSelector()
        self._selector.register(sock, selectors.EVENT_READ)

    def fileno(self) -> int:
        """Return the descriptor, which is readable when there is a call."""
        return self._socket.fileno()

    def receive(self, *, wait: bool = True) -> Call | None:
        """Return the next call; without ``wait`` None if there is no call now.

        Raises EOFError if the parent is gone.
        """
        if not wait and not self._selector.select(0):
            return None
        (length,) = LENGTH.unpack(self._exactly(LENGTH.size))
        call: Call = pickle.loads(self._exactly(length))
        return call

    def reply(self, id: int, result: Any) -> None:
        self._send(framed(Answer(id, result)))

    def fail(self, id: int, error: BaseException) -> None:
        """Send an error; one that cannot be pickled or read is sent as a CodeError."""
        text = errors.traceback_of(error, self.mask)
        self._keep_whole(error, text)
        as_code, fault = errors.CodeError.of(error, self.mask), errors.fault_of(error, self.mask)
        error = self.mask.error(error)
        if isinstance(error, errors.GrpoError) and len(errors.message_of(error)) > LONGEST_ERROR:
            error.args = (errors.shortened(errors.message_of(error), LONGEST_ERROR),)
        ends = not isinstance(error, Exception)  # such as SystemExit, which must end only this process
        if ends or (self.own_errors_only and not isinstance(error, errors.GrpoError)):
            error = as_code
        try:
            str(error)
            frame = framed(Answer(id, error=error, traceback=text, fault=fault))
            pickle.loads(frame[LENGTH.size :])
        except Exception:
            frame = framed(Answer(id, error=as_code, traceback=text, fault=fault))
        self._send(frame)

    def _keep_whole(self, error: BaseException, sent: str) -> None:
        """Write an error's traceback to the log if it is sent shortened; only the first ones."""
        whole = "".join(traceback.format_exception(error))
        if self.log is not None and len(whole) > len(sent) and self._kept < MOST_KEPT:
            self._kept += 1
            print(whole[:LONGEST_KEPT], file=self.log, flush=True)

    def close(self) -> None:
        """Close this process's end of the socket."""
        self._selector.close()
        self._socket.close()

    def answer(self, call: Call, target: Any) -> None:
        """Call the method, and send its result or error."""
        try:
            result = getattr(target, call.method)(*call.args)
        except Exception as error:
            self.fail(call.id, error)
            return
        if isinstance(result, Future):
            result.add_done_callback(partial(self._answer_later, call.id))
        else:
            self.reply(call.id, result)

    def made(self, make: Callable[[], Any]) -> Any:
        """Return the object that answers the calls; None if making it raised.  Tells the parent."""
        try:
            target = make()
            description = target.description() if hasattr(target, "description") else None
        except BaseException as error:
            self.fail(0, error)
            return None
        self.reply(0, description)
        return target

    def _answer_later(self, id: int, done: Future[Any]) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # its main thread sees that too
            if (error := done.exception()) is not None:
                self.fail(id, error)
            else:
                self.reply(id, done.result())

    def _send(self, frame: bytes) -> None:
        with self._sending:
            self._socket.sendall(frame)

    def _exactly(self, n: int) -> bytes:
        chunks = bytearray()
        while len(chunks) < n:
            chunk = self._socket.recv(min(n - len(chunks), 1 << 20))
            if not chunk:
                raise EOFError
            chunks += chunk
        return bytes(chunks)


def main(fd: int, parent: int, *, own_errors_only: bool = False) -> None:
    """Run the child process; see ``Connection``."""
    die_with(parent)
    collect_rarely()
    sys.stdout, sys.stderr = _Log(1, NOTHING_HIDDEN), _Log(2, NOTHING_HIDDEN)
    leave_signals_to_parent()
    connection = Connection(socket.socket(fileno=fd), own_errors_only=own_errors_only)
    os.register_at_fork(after_in_child=connection.close)  # or the parent would not see this process end
    try:
        hello = connection.receive()
        assert hello is not None
        kwargs, connection.mask = hello.args
        sys.stdout, sys.stderr = _Log(1, connection.mask), _Log(2, connection.mask)
        connection.log = sys.stderr
        if (target := connection.made(lambda: _imported(hello.method)(**kwargs))) is None:
            return
        spare_the_collector()
        if hasattr(target, "serve"):
            target.serve(connection)
            return
        while (call := connection.receive()) is not None:
            connection.answer(call, target)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        _leave(0)
    except BaseException:
        traceback.print_exc()
        _leave(1)
    _leave(0)


def leave_signals_to_parent() -> None:
    """Ignore the signals that end a run and may reach all its processes; a child ends with its parent.

    Programs that a child starts do not: its code may end them with SIGTERM.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stay)  # programs do not inherit a handler, but would inherit SIG_IGN

    def stay_no_more() -> None:
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is _stay:
                signal.signal(number, signal.SIG_DFL)

    os.register_at_fork(after_in_child=stay_no_more)


def _stay(number: int, frame: object) -> None:
    """Do nothing."""


class _LogFile(io.FileIO):
    """A file whose errors are ignored: a full or broken disk under a log does not end a run."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)


class _Log(io.TextIOWrapper):
    """Writes text with its secrets masked."""

    def __init__(self, fd: int, mask: Mask) -> None:
        file = io.BufferedWriter(_LogFile(fd, "wb", closefd=False))
        super().__init__(file, "utf-8", "backslashreplace", line_buffering=True)
        self._mask = mask

    def write(self, text: str) -> int:
        super().write(self._mask(text))
        return len(text)


def _imported(factory: str) -> Any:
    """Return the attribute of a module or of a file."""
    home, _, attribute = factory.rpartition(":")
    if home.endswith(".py"):
        from grpo_core.plugins.files import import_file

        return getattr(import_file(Path(home)), attribute)
    return getattr(importlib.import_module(home), attribute)


def _leave(status: int) -> None:
    """Exit at once; threads of libraries must not keep the process alive."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies (Linux only; else the closed socket does)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(0)
