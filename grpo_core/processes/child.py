"""A killable child process that owns one object: an environment, a trainer, an engine.

The child is a new process (``subprocess``, never ``fork``: no inherited threads, locks or CUDA).  It makes
its object by name and answers calls on its main thread, so that signals and event loops work there.  Parent
and child exchange length-prefixed pickles over a private socket pair that no other process can open.  The
child dies with its parent, leaves the signals that end a run to the parent, and prints to its log.

    parent                                      child
    Child("module:factory", kwargs)   ------>   target = factory(**kwargs)
    await child.call("step", batch)   ------>   target.step(batch)            (one after the other), or
                                                target.serve(connection)      (the target runs its own loop)

A method may return a ``concurrent.futures.Future``: the call is answered when it is done; other calls
continue.

The child leads a process group and has a unique mark (see ``orphans``).  When it ends for any reason, its
parent kills the rest of the group, and on Linux all processes that inherited the mark: programs that the
child started may lead other sessions.  If the parent was killed, its watcher does so.

A thread replaces the process for objects that exist only in this process.  It has the same interface: calls
over the same kind of socket, so that nothing is shared by accident.  A thread gives no protection: code that
hangs is abandoned on its daemon thread at its deadline, and code that crashes takes the process with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_core.contracts import errors, incidents
from grpo_core.processes import orphans, secrets
from grpo_core.processes.interpreters import Interpreter
from grpo_core.processes.memory import resident
from grpo_core.processes.served import LENGTH, Answer, Call, Connection, RemoteTraceback, framed
from grpo_core.text.credentials import Mask

_BOOT = """
import sys
sys.path += [path for path in sys.argv[3:] if path not in sys.path]
del sys.argv[3:]
from grpo_core.processes import served
served.main(*map(int, sys.argv[1:]))
"""
LAST_WORDS = 4000
"""Bytes at the end of a dead child's log whose lines are shown."""
LAST_LINES = 6
ENDING = 5.0
"""Seconds for a killed process to end, unless the kernel keeps it."""


_CHILDREN: weakref.WeakSet[Child] = weakref.WeakSet()
_MARKS = orphans.Marks()


def descendants(pid: int, but: Collection[int] = ()) -> Iterator[int]:
    """Yield a process and all its known descendants.

    Args:
        pid: of the process.
        but: processes to leave out, with their descendants.
    """
    yield pid
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                if child not in but:
                    yield from descendants(child, but)


def memory() -> dict[str, float]:
    """Return the resident memory in MiB of the run's processes on this machine, as ``memory/PROCESS``.

    A process includes its descendants, and processes of the same name are summed.  Shared memory counts for
    each process.  Empty without ``/proc``.
    """
    found: dict[str, float] = defaultdict(float)
    named = {child.pid: child.name for child in list(_CHILDREN) if child.alive}  # each leads a group
    for pid, name in [(os.getpid(), "main"), *named.items()]:
        metric = "memory/" + re.sub(r"\W+", "_", name).strip("_")  # such as "environment_of_task_sort"
        for each in descendants(pid, named.keys() if name == "main" else ()):
            found[metric] += resident(each) / 2**20
    return {name: mib for name, mib in found.items() if mib}


class Child:
    """A child process that starts at once; ``started`` or the first ``call`` waits for its target.

    Args:
        factory: ``"module:attribute"`` or ``"path/to/file.py:attribute"``, imported in the child.
        kwargs: keyword arguments of the factory; pickled.
        name: name of the child in messages (``"environment sort"``).
        environ: added to the child's environment variables.
        mask: hides secrets in errors, in tracebacks and in the output of Python code; default: those of this
            process.
        log: file for the child's output; None is the parent's standard error.
        interpreter: another Python to run it in.
    """

    def __init__(
        self,
        factory: str,
        kwargs: Mapping[str, Any] | None = None,
        *,
        name: str,
        environ: Mapping[str, str] | None = None,
        mask: Mask | None = None,
        log: Path | None = None,
        interpreter: Interpreter | None = None,
    ) -> None:
        self.name = name
        self._mask = secrets.mask() if mask is None else mask
        self._log = log
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._connecting = asyncio.Lock()
        self._heard = 0.0
        """Time of the last answer."""
        self.death: errors.GrpoError | None = None
        """Why it ended, if known; None while it runs.  All waiting calls raise it."""
        self._mark = ""
        self._socket, theirs = socket.socketpair()
        try:
            self._process = self._launch(theirs, environ or {}, interpreter)
        finally:
            theirs.close()
        self._socket.setblocking(True)
        self._socket.sendall(framed(Call(0, factory, (dict(kwargs or {}), self._mask))))
        self._socket.setblocking(False)

    def _launch(
        self, theirs: socket.socket, environ: Mapping[str, str], interpreter: Interpreter | None
    ) -> subprocess.Popen[bytes] | _Serving:
        """Start the process at the other end of the socket."""
        _CHILDREN.add(self)
        self._mark = _MARKS.make()
        with open(self._log, "ab") if self._log else os.fdopen(os.dup(2), "wb") as output:
            numbers = [str(theirs.fileno()), str(os.getpid())]
            # it imports from where this process does; programs that it starts would inherit PYTHONPATH
            ours = [sys.executable, "-P", "-c", _BOOT, *numbers, *filter(None, sys.path)]
            inherited = interpreter.variables(os.environ) if interpreter else os.environ
            return subprocess.Popen(
                interpreter.command(theirs.fileno()) if interpreter else ours,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**inherited, **environ, orphans.MARK: self._mark},
                # for killpg, and out of ctrl-C's reach; no session: where Linux shares the cores among
                # sessions, those that compute may keep the one that wakes up waiting for a second
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self.death is None and not self._has_ended()

    async def started(self, *, seconds: float) -> Any:
        """Wait until the target is made; return its ``description()`` if it has one.

        Raises the factory's error, ChildDied, or DeadlineExceeded after ``seconds``.
        """
        await self._connect()
        return await self._answer(0, "start", seconds)

    async def call(self, method: str, *args: Any, seconds: float | None) -> Any:
        """Call ``target.method(*args)`` in the child; raise its exceptions here.

        After ``seconds`` without an answer the child is killed, and all waiting calls fail.
        """
        return await self._answer(await self._send(method, *args), method, seconds)

    async def call_alongside(self, method: str, *args: Any, seconds: float | None, grace: float) -> Any:
        """Call a method of a target that serves several calls at once, each for at most ``seconds``.

        A cancelled caller cancels the call: the target receives a call "cancel" with its number.  The child
        is killed if it sends nothing at all for ``seconds + grace``, unless ``seconds`` is None.
        """
        id = await self._send(method, *args)
        try:
            return await self._answer(id, method, seconds, grace=grace)
        except asyncio.CancelledError:
            if self.death is None and self._writer is not None:
                self._writer.write(framed(Call(next(self._ids), "cancel", (id,))))
            raise

    async def _send(self, method: str, *args: Any) -> int:
        await self._connect()
        if self.death is not None:
            raise self.death
        id = next(self._ids)
        assert self._writer is not None
        self._waiting[id] = asyncio.get_running_loop().create_future()
        self._writer.write(framed(Call(id, method, args)))
        return id

    async def died(self) -> errors.GrpoError:
        """Wait until the child has ended for any reason, and return the reason."""
        await self._connect()
        if self._reader is not None:
            await asyncio.shield(self._reader)
        assert self.death is not None
        return self.death

    def kill(self, why: errors.GrpoError | None = None) -> None:
        """Kill the child and its children; waiting calls raise ``why`` or ChildDied.

        A child that the kernel does not end within ``ENDING`` seconds is reported, and left to a thread.
        """
        if self.death is None:
            self.death = why or errors.ChildDied(f"{self.name} was stopped")
        if not self._has_ended():
            self._kill_group()
            self._process.kill()  # if it has not made its group yet
            self._reap()
        if self._writer is not None:
            self._writer.close()
        else:
            self._socket.close()
        self._fail_waiting()

    async def aclose(self, *, seconds: float = 2.0) -> None:
        """Give the child ``seconds`` to exit, then kill it."""
        if self._writer is not None and self.death is None:
            self.death = errors.ChildDied(f"{self.name} is closed")
            self._writer.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._wait, seconds)
        self.kill()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)

    def _has_ended(self) -> bool:
        if self._process.returncode is None and self._process.poll() is not None:
            self._kill_descendants()
        return self._process.returncode is not None

    def _reap(self) -> None:
        """Wait for the end of a killed child, but not forever: the event loop is blocked."""
        try:
            self._wait(ENDING)
        except subprocess.TimeoutExpired:
            incidents.report(
                "deadline",
                self.name,
                f"its process {self.pid} was killed and has not ended within {ENDING:g} s: the kernel keeps "
                "it and its memory, perhaps for a disk or a GPU that does not answer",
            )
            threading.Thread(target=self._wait, name=f"end of {self.name}", daemon=True).start()

    def _wait(self, seconds: float | None = None) -> int:
        code = self._process.wait(seconds)
        self._kill_descendants()
        return code

    def _kill_group(self) -> None:
        """Kill the child and its group, even if the child itself has just ended.

        Linux gives the group's number to no other process while the group has members.
        """
        with contextlib.suppress(ProcessLookupError, PermissionError):  # no such group; macOS: only zombies
            os.killpg(self._process.pid, signal.SIGKILL)

    def _kill_descendants(self) -> None:
        """Kill all descendants, also those outside the group, once the child can start no more."""
        self._kill_group()
        if self._mark:
            orphans.end_marked(self._mark)

    async def _connect(self) -> None:
        async with self._connecting:
            if self._writer is None and self.death is None:
                stream, self._writer = await asyncio.open_connection(sock=self._socket)
                self._waiting[0] = asyncio.get_running_loop().create_future()
                self._reader = asyncio.create_task(self._read(stream), name=f"reader of {self.name}")

    async def _answer(
        self, id: int, method: str, seconds: float | None, *, grace: float | None = None
    ) -> Any:
        """Wait for an answer; ``grace`` extends the wait while others arrive.  Kill a late child."""
        if self.death is not None:
            raise self.death
        future = self._waiting[id]
        loop = asyncio.get_running_loop()
        since = loop.time()
        try:
            while not future.done():
                patience = None if seconds is None else since + seconds + (grace or 0.0) - loop.time()
                # a cancelled caller does not cancel the future: others may await it
                await asyncio.wait([future], timeout=patience)
                if not future.done() and (grace is None or self._heard <= since):
                    late = f"{self.name}: no answer to {method!r} within {seconds:g} s; killed"
                    self.kill(errors.DeadlineExceeded(late))
                since = self._heard
            return future.result()
        finally:
            if id:  # the start has one answer for all who wait for it
                self._waiting.pop(id, None)

    async def _read(self, stream: asyncio.StreamReader) -> None:
        try:
            while True:
                (length,) = LENGTH.unpack(await stream.readexactly(LENGTH.size))
                answer: Answer = pickle.loads(await stream.readexactly(length))
                self._heard = asyncio.get_running_loop().time()
                future = self._waiting.get(answer.id)
                if future is None or future.done():
                    continue  # its caller was cancelled
                if answer.error is not None:
                    answer.error.__cause__ = RemoteTraceback(answer.traceback, answer.fault)
                    future.set_exception(answer.error)
                else:
                    future.set_result(answer.result)
        except (asyncio.IncompleteReadError, ConnectionError, OSError):
            if self.death is None:
                code = await asyncio.to_thread(self._wait)
                self.death = errors.ChildDied(f"{self.name} died ({_exit(code)}){self._last_words()}")
            self._fail_waiting()
        except Exception as error:  # of unpickling; its callers must not wait forever
            self.kill(
                errors.ChildDied(
                    f"{self.name} was killed: its answer is unreadable: {errors.describe(error)}"
                )
            )

    def _fail_waiting(self) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(self.death or errors.ChildDied(f"{self.name} died"))
                future.exception()  # marks the error as seen: a caller may have been cancelled

    def _last_words(self) -> str:
        if self._log is None:
            return ""
        try:
            with open(self._log, "rb") as log:
                log.seek(max(0, os.fstat(log.fileno()).st_size - LAST_WORDS))
                tail = log.read(LAST_WORDS).decode(errors="replace").strip().splitlines()[-LAST_LINES:]
        except OSError:
            return ""
        masked = self._mask("\n".join(f"    {line}" for line in tail))  # programs that it started print, too
        return f"; the end of {self._log}:\n{masked}" if masked else ""


def _exit(code: int) -> str:
    if code >= 0:
        return f"exit status {code}"
    with contextlib.suppress(ValueError):  # most real-time signals have no name
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def scratch_directory() -> tempfile.TemporaryDirectory[str]:
    """Make a temporary directory that is removed even if this process is killed (Linux only)."""
    return _MARKS.directory()


class ThreadChild(Child):
    """A ``Child`` whose target lives on a thread of this process.

    Args:
        make: makes the target, on that thread; its last call is ``release()``.
        name: name of the child in messages.
    """

    def __init__(self, make: Callable[[], Any], *, name: str) -> None:
        self._make = make
        super().__init__("", name=name)

    def _launch(
        self, theirs: socket.socket, environ: Mapping[str, str], interpreter: Interpreter | None
    ) -> subprocess.Popen[bytes] | _Serving:
        return _Serving(theirs.dup(), self._make, self.name)

    def _kill_group(self) -> None:
        """Do nothing: a thread has no process group."""


class _Serving:
    """A thread with the interface of ``subprocess.Popen``."""

    def __init__(self, connection: socket.socket, make: Callable[[], Any], name: str) -> None:
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

    def _serve(self, sock: socket.socket, make: Callable[[], Any]) -> None:
        code, connection = 0, Connection(sock)
        try:
            connection.receive()
            if (target := connection.made(make)) is None:
                return
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
