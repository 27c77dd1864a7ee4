"""Child processes without the seconds of their imports: forks of a process that has made them.

``python nursery.py SOCKET MODULE ...`` waits at a socket, imports the modules at the first request, and forks
for each one.  ``install`` lets each ``Child`` of this process ask there: environments, trainers and engines.
What has another interpreter, or other variables that count at its start, is started anew.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

KINDS = {
    "environment": (
        {"CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"},
        ["grpo_core.processes.served", "grpo_core.environments.host"],
    ),
    "model": (
        {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GOMP_SPINCOUNT": "10000"},
        [
            "grpo_core.processes.served",
            "grpo_core.training.trainer",
            "grpo_core.engines.local.server",
            "transformers.models.llama.modeling_llama",
        ],
    ),
}
"""The variables of the children of a kind, and the modules that they import."""
EARLY = ("CUDA", "HF_", "LD_", "PYTHON", "TORCH", "TRANSFORMERS_")
"""Beginnings of the names of variables that count at a start; the number of threads is set later."""


def kind(name: str) -> str:
    """Return the kind of a child by its name, or an empty text."""
    if name.startswith("environment of task"):
        return "environment"
    return "model" if name == "engine local" or name.startswith("trainer") else ""


def start(path: str) -> subprocess.Popen[bytes]:
    """Start the nursery of the kind that ends its path; it ends with its standard input."""
    variables, modules = KINDS[path.rpartition("-")[2]]
    command = [sys.executable, "-P", __file__, path, *modules]
    started = subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **variables}
    )
    while not os.path.exists(path):
        time.sleep(0.01)
    return started


def install(path: Callable[[], str]) -> Callable[[], None]:
    """Let the children of this process be forks of the nurseries at ``path()-KIND``; returns what ends it."""
    from grpo_core.processes import child

    launch = child.Child._launch

    def launched(self: child.Child, theirs: Any, environ: Any, interpreter: Any) -> Any:
        which = "" if interpreter else kind(self.name)

        def popen(command: list[str], **given: Any) -> Any:
            forked = Forked.of(f"{path()}-{which}", command, **given) if which else None
            return forked or subprocess.Popen(command, **given)

        child.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen})
        try:
            return launch(self, theirs, environ, interpreter)
        finally:
            child.subprocess = subprocess

    child.Child._launch = launched
    return partial(setattr, child.Child, "_launch", launch)


class Forked:
    """A fork of a nursery, with the part of the interface of ``subprocess.Popen`` that ``Child`` uses."""

    def __init__(self, there: socket.socket, pid: int) -> None:
        self._there, self.pid, self._reading = there, pid, threading.Lock()
        self.returncode: int | None = None

    @classmethod
    def of(cls, path: str, command: list[str], **given: Any) -> Forked | None:
        """Return None where the nursery cannot make such a process, or has died."""
        there, pid = socket.socket(socket.AF_UNIX), 0
        wanted = json.dumps([given["env"], os.getcwd(), command[6:]]).encode() + b"\n"
        with contextlib.suppress(OSError):
            there.connect(path)
            socket.send_fds(there, [wanted], [*given["pass_fds"], given["stdout"].fileno()])
            pid = int(_line(there) or 0)
        if not pid:
            there.close()
        return cls(there, pid) if pid else None

    def poll(self) -> int | None:
        with self._reading:  # other threads may wait
            if self.returncode is None and select.select([self._there], [], [], 0)[0]:
                self.returncode = int(_line(self._there) or -signal.SIGKILL)
                self._there.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        begin = time.monotonic()
        while (code := self.poll()) is None:
            if timeout is not None and time.monotonic() - begin > timeout:
                raise subprocess.TimeoutExpired("a fork", timeout)
            time.sleep(0.01)
        return code

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _line(there: socket.socket) -> bytes:
    read = b""
    while not read.endswith(b"\n") and (more := there.recv(1)):
        read += more
    return read


def _serve(path: str, modules: list[str]) -> None:
    early = _early(os.environ)
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    woken, wakes = os.pipe()
    os.set_blocking(wakes, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)
    owners: dict[int, socket.socket | None] = {}
    while True:
        watched = {owner: pid for pid, owner in owners.items() if owner is not None}
        ready, _, _ = select.select([0, listening, woken, *watched], [], [])
        if 0 in ready:
            return
        for owner in watched.keys() & {*ready}:  # it has closed its end, or died
            with contextlib.suppress(ProcessLookupError):
                os.killpg(watched[owner], signal.SIGKILL)
            owners[watched[owner]] = owner.close()
        if woken in ready:
            os.read(woken, 512)
            for pid in list(owners):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended and (owner := owners.pop(pid)) is not None:
                    _tell(owner, os.waitstatus_to_exitcode(status))
                    owner.close()
        if listening in ready:
            there, _ = listening.accept()
            data, fds, _, _ = socket.recv_fds(there, 1 << 16, 2)
            while not data.endswith(b"\n"):
                data += there.recv(1 << 16)
            environ, cwd, paths = json.loads(data)
            if _early(environ) != early:
                pid = 0
            else:
                for name in modules:
                    importlib.import_module(name)
                gc.freeze()
                if not (pid := os.fork()):
                    _become(environ, cwd, paths, *fds)
                owners[pid] = there
            _tell(there, pid)
            for fd in fds:
                os.close(fd)


def _tell(there: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # the other end is gone
        there.send(b"%d\n" % number)


def _early(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(EARLY)}


def _become(environ: dict[str, str], cwd: str, paths: list[str], theirs: int, output: int) -> None:
    """Be as a process that ``Child`` has started."""
    from grpo_core.processes import served

    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setpgid(0, 0)
    null = os.open(os.devnull, os.O_RDWR)
    for place, fd in enumerate((null, output, output, theirs)):
        os.dup2(fd, place)
    os.closerange(4, 4096)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.path += [path for path in paths if path not in sys.path]
    served.main(3, os.getppid())
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _serve(sys.argv[1], sys.argv[2:])
