"""Programs without the seconds of their imports: each run is a fork of a process that has made them.

``grpo`` runs the command as ``subprocess.run`` would; its children are forks as well (see ``nursery``).  A
test of the start of the process, of its signals, its terminal or its death starts the real program.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from importlib import metadata
from pathlib import Path

import nursery

GRPO = str(Path(sys.executable).with_name("grpo-core"))
COMMAND = (
    "grpo_core.__main__",
    "grpo_core.commands.running",
    "grpo_core.commands.complaints",
    "transformers.tokenization_utils_tokenizers",
)
"""The command, and what it imports when it starts something."""
_PATH = os.environ.get("PYTHONPATH")


@functools.cache
def _forker(*names: str) -> subprocess.Popen[bytes]:
    """Return a process that has imported the modules; the first of them has the function ``main``."""
    command = [sys.executable, __file__, *names]
    forker = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    atexit.register(forker.__exit__, None, None, None)  # closes the pipes, and waits for its end
    return forker


def forked(
    names: tuple[str, ...],
    arguments: list[str],
    cwd: Path | str,
    environ: dict[str, str],
    timeout: float,
    children: str = "",
) -> subprocess.CompletedProcess[str]:
    """Run ``main`` of the first module with the arguments; the others are imported before.

    Its children are forks of the nurseries at the path ``children``, if it is given.
    """
    forker = _forker(*names)
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        files = [f"/proc/{os.getpid()}/fd/{each.fileno()}" for each in (out, err)]
        wanted = [arguments, os.path.abspath(cwd), environ, files, children]
        assert forker.stdin is not None
        assert forker.stdout is not None
        forker.stdin.write(json.dumps(wanted).encode() + b"\n")
        forker.stdin.flush()
        pid = int(forker.stdout.readline())
        limit = threading.Timer(timeout, os.killpg, [pid, signal.SIGKILL])
        limit.start()
        status = int(forker.stdout.readline())
        limit.cancel()
        texts = []
        for file in (out, err):
            file.seek(0)
            texts.append(file.read().decode())
    return subprocess.CompletedProcess(arguments, status, *texts)


def grpo(
    cwd: Path | str, *arguments: object, timeout: float = 120, **environ: str
) -> subprocess.CompletedProcess[str]:
    """Run ``grpo-core`` to its end, or kill it after so many seconds."""
    words, variables = [GRPO, *map(str, arguments)], {**os.environ, **environ}
    if variables.get("PYTHONPATH") != _PATH or sys.platform != "linux":
        return subprocess.run(
            words, cwd=cwd, env=variables, capture_output=True, text=True, timeout=timeout, check=False
        )
    return forked(COMMAND, words, cwd, variables, timeout, nurseries())


@functools.cache
def nurseries() -> str:
    """Start the nurseries of children, if they have not been; returns what their paths begin with."""
    path = tempfile.mkdtemp(prefix="grpo-nursery-") + "/at"
    atexit.register(shutil.rmtree, os.path.dirname(path), True)
    for kind in nursery.KINDS:
        atexit.register(nursery.start(f"{path}-{kind}").__exit__, None, None, None)
    return path


def _serve(names: list[str]) -> None:
    for name in names:
        importlib.import_module(name)
    for entry in metadata.entry_points(group="grpo_core"):
        entry.load()
    sys.path[0] = str(Path(GRPO).parent)  # as that of the command
    gc.freeze()
    while (line := sys.stdin.buffer.readline()) and (pid := os.fork()):
        os.write(1, b"%d\n" % pid)
        os.write(1, b"%d\n" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
    if not line:
        return
    os.setsid()
    sys.argv, cwd, environ, (out, err), children = json.loads(line)
    for place, path in enumerate((os.devnull, out, err)):
        os.dup2(os.open(path, os.O_RDWR), place)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environ)
    if children:
        nursery.install(lambda: children)
    sys.modules[names[0]].main()


if __name__ == "__main__":
    _serve(sys.argv[1:])
