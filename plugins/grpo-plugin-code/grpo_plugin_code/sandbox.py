"""Sandboxes for single programs: bubblewrap, resource limits, no network.

    environment's process                     sandbox (separate namespaces, read-only system)
    Sandboxes.run(job)  ---- job: stdin --->  inside.py: sets limits, drops rights, runs the code
                        <--- output, values -

A program sees read-only libraries and Python, a private /tmp in memory, only its own processes, and no
network.  Each program runs in a new sandbox, which is discarded with all its processes.  Sandboxes are
started ahead, because starting bubblewrap and Python takes longer than most programs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from attrs import field, frozen
from attrs.validators import ge, gt

import grpo_core as grpo
from grpo_plugin_code.calls import filter_of
from grpo_plugin_code.child import Child
from grpo_plugin_code.images import Image, System, of_an_image, of_this_machine
from grpo_plugin_code.launch import (
    FILTER,
    PREFERRED,
    STARTING,
    empty_input,
    fault_of,
    fill,
    filter_to_read,
    framed,
    ids_of_sandboxes,
    in_random_order,
    with_descriptors,
)

Reason = Literal["", "error", "time", "cpu", "output", "killed"]
"""Reason of a failure: a nonzero exit status, a limit or a signal; empty for success."""

MIB = 2**20
READY = b"ready\n"
"""First line on the pipe for values: the sandbox waits for its program."""
DYING = 10.0
"""Time limit for the end of a killed sandbox's processes in seconds."""


@frozen(kw_only=True)
class Limits:
    """The limits of one program."""

    seconds: float = field(default=10.0, validator=gt(0))
    """Seconds of wall time."""
    cpu_seconds: int = field(default=5, validator=ge(1))
    """CPU seconds of each process."""
    memory: int = field(default=512, validator=ge(64))
    """MiB of each process's address space."""
    files: int = field(default=16, validator=ge(1))
    """MiB of the private /tmp, and of each file."""
    processes: int = field(default=16, validator=ge(1))
    """Number of processes and threads."""
    output: int = field(default=256, validator=ge(1))
    """KiB of output, and KiB of values."""

    def resources(self) -> dict[str, int]:
        """Return the resource limits of each process, by name."""
        return {
            "RLIMIT_CPU": self.cpu_seconds,  # SIGKILL follows a second later
            "RLIMIT_AS": self.memory * MIB,
            "RLIMIT_FSIZE": self.files * MIB,
            "RLIMIT_NPROC": self.processes,
            "RLIMIT_NOFILE": 256,
            "RLIMIT_CORE": 0,
        }


@frozen(kw_only=True)
class Job:
    """A program to run.

    Attributes:
        code: Python source.
        stdin: text of its standard input.
        calls: expressions to evaluate after the code.
        seconds: wall time limit, if it is shorter than the limit of all programs.
    """

    code: str
    stdin: str = ""
    calls: Sequence[str] = ()
    seconds: float = 0.0


@frozen(kw_only=True)
class Outcome:
    """The result of a program."""

    reason: Reason
    message: str
    """Description of the reason, with the last line of standard error."""
    output: str
    """Standard output."""
    values: Sequence[str]
    """Values as lines of JSON; see ``inside.py``."""
    seconds: float


class Sandboxes:
    """Runs programs in sandboxes that are started ahead.

    Args:
        limits: limits of each program.
        at_once: number of concurrent programs, or a shared semaphore.
        ready: number of sandboxes that are started ahead.
        mounts: further writable directories in memory, empty like /tmp.
        image: root file system of the sandboxes; None uses this machine's.

    Raises ConfigError if sandboxes do not work on this machine; code never runs without one.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        at_once: int | asyncio.Semaphore,
        ready: int,
        mounts: Sequence[str] = (),
        image: Image | None = None,
    ) -> None:
        self._limits, self._ready = limits, ready
        self._command = command(limits, mounts, image)
        ids = ids_of_sandboxes()
        self._ids: Iterator[int] | None = in_random_order(ids) if ids else None
        self._slots = asyncio.Semaphore(at_once) if isinstance(at_once, int) else at_once
        self._waiting: deque[asyncio.Task[_Sandbox]] = deque()

    async def run(self, job: Job) -> Outcome:
        """Run a program until it ends or meets a limit."""
        async with self._slots:
            sandbox = await self._next()
            try:
                return await sandbox.run(job)
            finally:
                sandbox._child.kill()  # kills bubblewrap and every process of its sandbox
                await sandbox.aclose()

    async def aclose(self) -> None:
        """End the idle sandboxes."""
        while self._waiting:
            with contextlib.suppress(Exception):
                await (await self._waiting.popleft()).aclose()

    async def _next(self) -> _Sandbox:
        while len(self._waiting) <= self._ready:
            user = next(self._ids) if self._ids is not None else 0
            self._waiting.append(asyncio.create_task(_Sandbox.start(self._command, self._limits, user)))
        start = self._waiting.popleft()
        try:
            await asyncio.wait([start])
        except asyncio.CancelledError:
            self._waiting.appendleft(start)  # keep the sandbox for the next program
            raise
        return start.result()


class _Sandbox:
    """A sandbox that waits for its program."""

    def __init__(self, words: Sequence[str], limits: Limits, user: int) -> None:
        self._limits, self._user = limits, user
        self._most = limits.output * 1024
        self._given, allowed = empty_input(), filter_to_read()
        try:
            self._child = Child(
                lambda values: with_descriptors(words, (values, self._given), allowed),
                shared=[self._given, allowed],
                most=self._most + len(READY),
            )
        except BaseException:
            os.close(self._given)
            raise
        finally:
            os.close(allowed)

    @classmethod
    async def start(cls, words: Sequence[str], limits: Limits, user: int) -> _Sandbox:
        sandbox = cls(words, limits, user)
        child = sandbox._child
        try:
            await asyncio.wait([child.line], timeout=STARTING)
            if child.received[2] == READY:
                return sandbox
        except BaseException:
            await sandbox.aclose()
            raise
        await sandbox.aclose()
        errors = child.received[1].decode(errors="replace").strip()
        raise grpo.PluginError(f"code: a sandbox does not start: {errors[-300:] or 'it says nothing'}")

    async def run(self, job: Job) -> Outcome:
        begin, child = time.monotonic(), self._child
        fill(self._given, job.stdin)
        child.write(framed(job.code, job.calls, self._limits.resources(), self._user))
        seconds = min(job.seconds or self._limits.seconds, self._limits.seconds)
        ended, _ = await asyncio.wait([child.exited], timeout=seconds)
        child.kill()
        if not await child.gone(DYING):
            raise TimeoutError(f"code: the processes of a sandbox are still there {DYING:g} s after its end")
        code = child.exited.result()
        out, err, values = (bytes(data) for data in child.received)
        values = values.removeprefix(READY)
        lines = values.decode(errors="replace").split("\n", len(job.calls))[: len(job.calls)]
        reason = _reason(code, (out, err, values), self._most) if ended else "time"
        return Outcome(
            reason=reason,
            message=self._message(reason, code, err) if ended else f"it took longer than {seconds:g} s",
            output=out.decode(errors="replace"),
            values=lines if lines and lines[-1] else lines[:-1],
            seconds=time.monotonic() - begin,
        )

    async def aclose(self) -> None:
        """End the sandbox, and wait until its processes are gone.

        An idle sandbox ends when its input is closed.  It is not killed, because bubblewrap's children do not
        die with it during its setup.
        """
        self._child.end_input()
        try:
            await self._child.gone(DYING)
        finally:
            self._child.close()
            os.close(self._given)

    def _message(self, reason: Reason, code: int, err: bytes) -> str:
        limits = self._limits
        match reason:
            case "":
                return ""
            case "cpu":
                return f"a process computed for longer than {limits.cpu_seconds} s"
            case "output":
                return f"it printed more than {limits.output} KiB"
            case "killed":
                return f"it was ended by {_signal(code)}"
        last = err.decode(errors="replace").strip().splitlines()[-1:] or [f"exit status {code}"]
        return last[0][:300]


def command(limits: Limits, mounts: Sequence[str] = (), image: Image | None = None) -> list[str]:
    """Return the command that starts a sandbox.  Raises ConfigError if it does not work on this machine."""
    mounts = ("/tmp", *mounts)
    system = of_this_machine(mounts) if image is None else of_an_image(image)
    filter_of()  # raises ConfigError on an unsupported machine
    words = _bubblewrap(limits, system, mounts)
    words += ["--", *system.python, "-I", "-S", "-X", "utf8", "-c"]
    words.append(Path(__file__).with_name("inside.py").read_text())
    if fault := fault_of(tuple(words)):
        raise grpo.ConfigError(
            f"code: bubblewrap cannot make a sandbox on this machine: {fault}. It needs user namespaces "
            "(kernel.unprivileged_userns_clone, or an AppArmor profile for bwrap), or root with the user ids "
            f"{PREFERRED[0]} to {PREFERRED[-1]} or others of its own (/proc/self/uid_map); in a container, "
            "its seccomp profile has to allow them. Code of a model is never run without a sandbox"
        )
    return words


def _bubblewrap(limits: Limits, system: System, mounts: Sequence[str]) -> list[str]:
    program = shutil.which("bwrap")
    if program is None:
        raise grpo.ConfigError(
            "code: there is no sandbox on this machine, and code of a model is never run without one. "
            "Install bubblewrap (apt install bubblewrap, dnf install bubblewrap)"
        )
    words = [program, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    words += ["--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv"]
    words += ["--hostname", "sandbox", "--seccomp", FILTER, "--cap-drop", "ALL"]
    if ids_of_sandboxes():  # process limits do not apply to root, so inside.py changes the user id
        words += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        words += ["--unshare-user", "--disable-userns"]
    for path, target in system.links.items():
        words += ["--symlink", target, path]
    for path, directory in system.directories.items():
        for parent in reversed(Path(path).parents[:-1]):  # traversable for all users
            words += ["--perms", "0755", "--dir", str(parent)]
        words += ["--ro-bind", directory, path]
    words += ["--proc", "/proc", "--dev", "/dev"]
    words += ["--dev-bind", "/dev/full", "/dev/zero"]  # also zeros, but no shared memory
    words += ["--remount-ro", "/dev"]
    for path in mounts:
        words += ["--perms", "1777", "--size", str(limits.files * MIB), "--tmpfs", path]
    words += ["--chdir", "/tmp", "--setenv", "HOME", "/tmp", "--setenv", "PATH", "/usr/bin:/bin"]
    return [*words, "--remount-ro", "/"]


def _reason(code: int, streams: Sequence[bytes], most: int) -> Reason:
    if any(len(stream) > most for stream in streams):
        return "output"
    if code == 0:
        return ""
    if code in (128 + signal.SIGXCPU, -signal.SIGXCPU):
        return "cpu"
    return "killed" if code < 0 or code > 128 else "error"


def _signal(code: int) -> str:
    number = -code if code < 0 else code - 128
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
