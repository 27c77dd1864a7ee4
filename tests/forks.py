"""Programs and children without the seconds of their imports: forks of a process that has made them.

``grpo`` runs the command as ``subprocess.run`` would.  ``install`` lets each ``Child`` of this process be a
fork: environments, trainers and engines; those of a command of ``grpo`` are forks, too.  What has another
interpreter, or other variables that count at a start, is started anew.  A test of the start of a process, of
its signals, its terminal or its death starts the real program.  The workers that run all tests are forks of a
process that has imported the libraries.

    python tests/forks.py SOCKET MODULE ...     imports at the first request, and forks for each one
    python tests/forks.py SOCKET -u -c CODE     runs code in a fork, as ``python -u -c CODE`` would
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

GRPO = str(Path(sys.executable).with_name("grpo-core"))
KINDS: dict[str, tuple[dict[str, str], list[str]]] = {
    "command": (
        {},
        [
            "grpo_core.__main__",
            "grpo_core.cli",
            "grpo_core.commands.running",
            "grpo_core.commands.complaints",
            "grpo_core.testing",
            "grpo_plugin_audit.commands",
            "grpo_plugin_devkit.commands",
            "grpo_plugin_doctor.commands",
            "grpo_plugin_replay.commands",
            "grpo_plugin_report.commands",
            "grpo_plugin_report.config",
            "cyclopts.help",
            "difflib",
            "docstring_parser",
            "packaging.requirements",
            "rich._emoji_codes",
            "rich.panel",
            "tomli_w",
            "transformers.tokenization_utils_tokenizers",
        ],
    ),
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
    "drawing": (
        {},
        ["drawing", "whole_iterable", "datasets", "torchdata.nodes", "torchdata.stateful_dataloader"],
    ),
    "worker": (
        {"OMP_NUM_THREADS": "1"},
        [
            "torch._dynamo",
            "torch.nn.attention.varlen",
            "transformers.models.llama.modeling_llama",
            "peft",
            "anthropic",
            "datasets",
            "openai.types.responses",
            "reasoning_gym",
            "textarena",
        ],
    ),
}
"""The variables of the forks of a kind, and the modules that they import."""
EARLY = ("CUDA", "HF_", "LD_", "PYTHON", "TORCH_", "TRANSFORMERS_")
"""Beginnings of the names of variables that count at a start; torch sets others itself."""
_INHERITED = dict(os.environ)


@functools.cache
def _folder() -> str:
    """Make the folder of the sockets, which ends with this process."""
    path = tempfile.mkdtemp(prefix="grpo-forks-")
    atexit.register(shutil.rmtree, path, True)
    return path + "/"


@functools.cache
def _server(kind: str) -> str:
    """Start the process that forks; it ends with its standard input.  Returns the path of its socket."""
    (variables, modules), path = KINDS[kind], _folder() + kind
    if os.path.exists(path):
        return path
    plugins = [entry.module for entry in metadata.entry_points(group="grpo_core") if not variables]
    command = [sys.executable, __file__, path, *modules, *plugins]
    environ = {**_INHERITED, **variables}
    started = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environ
    )
    atexit.register(started.__exit__, None, None, None)
    while not os.path.exists(path):
        time.sleep(0.01)
    return path


def shared() -> str:
    """Start all processes that fork, which import nothing yet, for those who ``share`` their folder."""
    for kind in KINDS if sys.platform == "linux" else ():
        _server(kind)
    return _folder()


def share(folder: str) -> None:
    """Take forks of the processes that another one has started, with the same variables."""
    global _folder
    _folder = functools.partial(str, folder)


def grpo(
    cwd: Path | str, *arguments: object, kind: str = "command", timeout: float = 120, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run ``grpo-core`` to its end, or kill it after so many seconds."""
    code = "sys.modules['grpo_core.__main__'].main()"
    if sys.platform == "linux":
        for child in ("environment", "model"):
            _server(child)
        code = f"sys.path[:1] = [{os.path.dirname(GRPO)!r}]; install({_folder()!r}.__add__); {code}"
    environ = {**os.environ, **KINDS[kind][0], **environ}
    return run(kind, code, [GRPO, *map(str, arguments)], cwd, environ, timeout)


def worker() -> str:
    """Return a command that takes the arguments of an interpreter for a worker of pytest."""
    return shlex.join([sys.executable, __file__, _server("worker")])


def run(
    kind: str, code: str, words: list[str], cwd: Path | str, environ: Mapping[str, str], timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run code of this module in a fork whose arguments are the words, or the words themselves."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = [out.fileno(), err.fileno()]
        started: Any = Forked.of(_server, kind, code, words, os.path.abspath(cwd), environ, files)
        if started is None:
            started = subprocess.Popen(words, cwd=cwd, env=environ, stdout=out, stderr=err)
        try:
            status = started.wait(timeout)
        finally:
            started.kill()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(words, status, *texts)


def install(path: Callable[[str], str] = _server) -> Callable[[], None]:
    """Let the children of this process be forks of the servers at ``path(kind)``; returns what ends it."""
    from grpo_core.processes import child

    def popen(command: list[str], **given: Any) -> Any:
        environ, forked = given["env"], None
        if command[3:4] == [child._BOOT]:
            kind = "environment" if environ.get("PYTHONHASHSEED") == "0" else "model"
            code = (
                f"sys.path[:1] = []; sys.path += [path for path in {command[6:]} if path not in sys.path];"
                "sys.modules['grpo_core.processes.served'].main(3, os.getppid())"
            )
            files = [given["stdout"].fileno(), given["stdout"].fileno(), *given["pass_fds"]]
            forked = Forked.of(path, kind, code, [""], os.getcwd(), environ, files)
        return forked or subprocess.Popen(command, **given)

    child.subprocess = SimpleNamespace(**{**vars(subprocess), "Popen": popen})
    return functools.partial(setattr, child, "subprocess", subprocess)


class Forked:
    """A fork of a server, with the part of the interface of ``subprocess.Popen`` that ``Child`` uses."""

    def __init__(self, there: socket.socket, pid: int) -> None:
        self._there, self.pid = there, pid
        self.returncode: int | None = None
        weakref.finalize(self, there.close)

    @classmethod
    def of(
        cls,
        path: Callable[[str], str],
        kind: str,
        code: str,
        words: list[str],
        cwd: str,
        environ: Mapping[str, str],
        files: list[int],
    ) -> Forked | None:
        """Return None where the server cannot make such a process, or has died."""
        early = {**_INHERITED, **KINDS[kind][0]}
        if sys.platform != "linux" or _early(environ) != _early(early):
            return None
        there, pid = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), b""
        with contextlib.suppress(OSError):
            there.connect(path(kind))
            socket.send_fds(there, [json.dumps([code, words, cwd, dict(environ)]).encode()], files)
            pid = there.recv(16)
        if not pid:
            there.close()
        return cls(there, int(pid)) if pid else None

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._there], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0)
            # it stays there: other threads may wait
            self.returncode = int(self._there.recv(16, socket.MSG_PEEK) or -signal.SIGKILL)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def _early(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(EARLY)}


def _serve(path: str, modules: list[str]) -> None:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(path)
    listening.listen()
    running: dict[int, tuple[int, socket.socket]] = {}
    while True:
        owners = [owner for _, owner in running.values()]
        ready, _, _ = select.select([0, listening, *running, *owners], [], [])
        if 0 in ready:
            return
        for end, (pid, owner) in list(running.items()):
            if owner in ready:  # it has closed its end, or died
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)
            if owner in ready or end in ready:
                status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                with contextlib.suppress(OSError):
                    owner.send(b"%d" % status)
                owner.close()
                os.close(end)
                del running[end]
        if listening in ready:
            there, _ = listening.accept()
            data, files, _, _ = socket.recv_fds(there, 1 << 18, 3)
            for name in modules:
                with contextlib.suppress(ImportError):  # not everybody installs all plugins
                    importlib.import_module(name)
            gc.freeze()
            pid = os.fork()
            os.setpgid(pid, pid)  # in both processes: neither need wait for the other
            if not pid:
                _become(*json.loads(data), files)
            running[os.pidfd_open(pid)] = pid, there
            there.send(b"%d" % pid)
            for file in files:
                os.close(file)


def _become(code: str, words: list[str], cwd: str, environ: dict[str, str], files: list[int]) -> None:
    """Be a process of its own, which ends without taking down all that was imported."""
    for place, file in enumerate([os.open(os.devnull, os.O_RDWR), *files]):
        os.dup2(file, place)
    os.closerange(len(files) + 1, 4096)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv, status = words, 0
    try:
        exec(code, globals())
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _work(path: str, code: str) -> int:
    """Run code in a fork with the files of this process, and wait for its end."""
    inside = f"_be_a_worker({code!r})"
    forked = Forked.of(lambda kind: path, "worker", inside, ["-c"], os.getcwd(), os.environ, [1, 2, 0])
    if forked is None:
        os.execv(sys.executable, [sys.executable, "-u", "-c", code])
    signal.signal(signal.SIGINT, lambda *_: os.kill(forked.pid, signal.SIGINT))
    return forked.wait()


def _be_a_worker(code: str) -> None:
    os.dup2(3, 0)
    os.close(3)
    for name in {"anyio", "platformdirs"} & sys.modules.keys():
        sys.modules[name].__doc__ = "PYTEST_DONT_REWRITE"  # they have plugins of pytest, which come too late
    sys.modules["__main__"] = main = ModuleType("__main__")
    exec(code, vars(main))


if __name__ == "__main__":
    if sys.argv[2:3] == ["-u"]:
        raise SystemExit(_work(sys.argv[1], sys.argv[-1]))
    _serve(sys.argv[1], sys.argv[2:])
