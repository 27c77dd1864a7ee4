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
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import frozen

import grpo_core as grpo
from grpo_plugin_code.calls import filter_of
from grpo_plugin_code.images import default_cache
from grpo_plugin_code.launch import fault_of
from grpo_plugin_code.systems import System
from grpo_plugin_code.users import ids_of_sandboxes

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
OWN = 8
"""Processes and threads of a container besides the program's."""


@frozen(kw_only=True)
class Room:
    """The limits of a program."""

    each: int
    """Bytes of each directory in memory."""
    memory: int
    """Bytes of a process."""
    processes: int


def command(system: System, places: Sequence[str], room: Room, inside: str) -> list[str]:
    """Return the command of a sandbox in a container.

    Its processes and directories have limits together, too, if podman can set them here.

    Args:
        system: the files that it shows.
        places: directories in memory that its program may write to.
        room: what the program may take.
        inside: text of the program that its Python runs.

    Raises ConfigError if podman is missing, or cannot run a container here.
    """
    program = shutil.which("podman")
    if program is None:
        raise grpo.ConfigError(
            'code: sandbox = "podman", and this machine has no podman. Install it (apt install podman, dnf '
            "install podman); code of a model is never run without a sandbox"
        )
    if os.geteuid() == 0 and not ids_of_sandboxes():
        raise grpo.ConfigError(
            'code: sandbox = "podman": this process is root of a user namespace without user ids for '
            "programs (/proc/self/uid_map). Give it ids by /etc/subuid and /etc/subgid, or use another user "
            "than root, or bubblewrap. Code of a model is never run without a sandbox"
        )
    whole = len(places) * room.each + room.memory * room.processes
    together = [f"--memory={whole}", f"--pids-limit={room.processes + OWN}"]
    python = [*system.python, "-I", "-S", "-X", "utf8", "-c", _text("container_guard.py") + inside]
    fault = ""
    for limits in (together, []):
        words = _podman(program, [*limits, *_mounts(system, places, room.each)])
        launched = _launched([*words, *python, filter_of().hex()])
        if not (fault := fault_of(tuple(launched))):
            return launched
    raise grpo.ConfigError(
        f"code: podman cannot run a container on this machine: {fault}. "
        "Unless it runs as root, it needs ids for containers in /etc/subuid and /etc/subgid. Code of a "
        "model is never run without a sandbox"
    )


def _podman(program: str, further: Sequence[str]) -> list[str]:
    processes = min(each for each in (PROCESSES, *resource.getrlimit(resource.RLIMIT_NPROC)) if each > 0)
    words = [program, "run", "--rm", "--interactive", "--preserve-fds=3", "--sig-proxy=false"]
    words += ["--network=none", "--no-hosts", "--hostname=sandbox", "--ipc=none", "--log-driver=none"]
    words += ["--cap-drop=all", "--cap-add=SETUID,SETGID", "--security-opt=no-new-privileges"]
    words += ["--security-opt=label=disable"]  # SELinux lets containers read only what has a label for them
    words += ["--read-only", "--read-only-tmpfs=false"]
    words += ["--ulimit=nofile=256:256", f"--ulimit=nproc={processes}:{processes}"]
    words += ["--workdir=/tmp", "--env=HOME=/tmp", "--env=PATH=/usr/bin:/bin"]
    return [*words, *further]


def _mounts(system: System, places: Sequence[str], size: int) -> list[str]:
    """Return the words for the files that a container shows."""
    directories = dict(system.directories)
    whole = directories.pop("/", None)
    words = [f"--mount=type=bind,src={here},dst={there},ro=true" for there, here in directories.items()]
    memory = f"rw,exec,nosuid,nodev,notmpcopyup,mode=1777,size={size}"
    words += [f"--tmpfs={place}:{memory}" for place in places]
    words += ["--volume=/dev/full:/dev/zero:dev"]  # it has zeros, too, and gives no shared memory
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


def _launched(words: Sequence[str]) -> list[str]:
    environ = {name: os.environ[name] for name in VARIABLES if name in os.environ}
    program = f"{_text('container_launcher.py')}\nmain({list(words)!r}, {environ!r})\n"
    return [os.path.realpath(sys.executable), "-I", "-S", "-c", program]


@functools.cache
def _text(name: str) -> str:
    return Path(__file__).with_name(name).read_text()
