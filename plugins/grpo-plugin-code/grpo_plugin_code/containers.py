"""Sandboxes as containers of podman, where bubblewrap is missing or cannot make one.

    environment's process -> container_launcher.py -> podman -> container_guard.py -> inside.py

The container shows the same system as bubblewrap's sandbox: this machine's, so that it needs no image, or the
directory of an image.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpo_core as grpo
from grpo_plugin_code.images import default_cache
from grpo_plugin_code.systems import System

VARIABLES = (
    "HOME",
    "PATH",
    "XDG_RUNTIME_DIR",
    "XDG_CONFIG_HOME",
    "XDG_DATA_HOME",
    "DBUS_SESSION_BUS_ADDRESS",
)
"""Variables by which podman finds its files and programs."""
PROCESSES = 4096
"""Limit of processes with which a container begins, and which ``inside.py`` lowers.  Podman's own may be
higher than the user's."""
STARTING = 60.0
"""Seconds in which a container has to start."""


def command(system: System, places: Sequence[str], size: int, inside: str) -> list[str]:
    """Return the command of a sandbox in a container.

    Args:
        system: the files that it shows.
        places: directories in memory that its program may write to.
        size: bytes of each of them.
        inside: text of the program that its Python runs.

    Raises ConfigError if podman is missing, or cannot run a container here.
    """
    program = shutil.which("podman")
    if program is None:
        raise grpo.ConfigError(
            'code: sandbox = "podman", and this machine has no podman. Install it (apt install podman, dnf '
            "install podman); code of a model is never run without a sandbox"
        )
    words = [*_podman(program, system, places, size), *system.python, "-I", "-S", "-X", "utf8", "-c"]
    _probe(tuple(words))
    return _launched([*words, _text("container_guard.py") + inside])


def _podman(program: str, system: System, places: Sequence[str], size: int) -> list[str]:
    processes = min(each for each in (PROCESSES, *resource.getrlimit(resource.RLIMIT_NPROC)) if each > 0)
    words = [program, "run", "--rm", "--interactive", "--preserve-fds=2", "--sig-proxy=false"]
    words += ["--network=none", "--no-hosts", "--hostname=sandbox", "--ipc=none", "--log-driver=none"]
    words += ["--cap-drop=all", "--cap-add=SETUID,SETGID", "--security-opt=no-new-privileges"]
    words += ["--security-opt=label=disable"]  # SELinux lets containers read only what has a label for them
    words += ["--read-only", "--read-only-tmpfs=false"]
    words += ["--ulimit=nofile=256:256", f"--ulimit=nproc={processes}:{processes}"]
    words += ["--workdir=/tmp", "--env=HOME=/tmp", "--env=PATH=/usr/bin:/bin"]
    directories = dict(system.directories)
    whole = directories.pop("/", None)
    words += [f"--mount=type=bind,src={here},dst={there},ro=true" for there, here in directories.items()]
    memory = f"rw,exec,nosuid,nodev,notmpcopyup,mode=1777,size={size}"
    words += [f"--tmpfs={place}:{memory}" for place in places]
    return [*words, "--rootfs", whole or str(_root((*directories, *places), system.links))]


def _root(points: Sequence[str], links: Mapping[str, str]) -> Path:
    """Make the root of containers, which has only links, and directories where others are mounted.

    It is kept for other processes, because not each of them lives to remove it.
    """
    digest = hashlib.sha256(json.dumps([points, links]).encode()).hexdigest()
    root = default_cache().with_name("containers") / digest[:16]
    for place in ("dev", "etc", "proc", "run", "sys", *points):
        (root / place.lstrip("/")).mkdir(parents=True, exist_ok=True)
    for place, target in links.items():
        with contextlib.suppress(FileExistsError):
            (root / place.lstrip("/")).symlink_to(target)
    for directory, _, _ in os.walk(root):
        os.chmod(directory, 0o755)  # for programs' user ids, whatever the umask
    return root


@functools.cache
def _probe(words: tuple[str, ...]) -> None:
    """Raise ConfigError if an empty program does not end well in a container."""
    empty = _launched([*words, _text("container_guard.py")])
    empty[-1] = "import os; os.dup2(2, 3)\n" + empty[-1]
    try:
        tried = subprocess.run(empty, capture_output=True, text=True, timeout=STARTING, env={})
    except (OSError, subprocess.TimeoutExpired) as error:
        raise grpo.ConfigError(f"code: podman does not run: {error}") from error
    if tried.returncode != 0:
        raise grpo.ConfigError(
            f"code: podman cannot run a container on this machine: {tried.stderr.strip()[-300:]}. "
            "Unless it runs as root, it needs ids for containers in /etc/subuid and /etc/subgid. Code of a "
            "model is never run without a sandbox"
        )


def _launched(words: Sequence[str]) -> list[str]:
    environ = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    program = f"{_text('container_launcher.py')}\nmain({list(words)!r}, {environ!r})\n"
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", program]


@functools.cache
def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text()
