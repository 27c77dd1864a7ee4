"""Runs one command in a directory; the source of this file is a job of the sandbox (see ``inside.py``).

It has the same privileges as the command, and nothing here is trusted: a command that forges its result only
changes its own files and output.
"""

import base64
import contextlib
import io
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import zlib
from typing import Any

PAGE = 4096
"""Page size: the unit in which files take memory."""


def unpack(directory: str, packed: str) -> None:
    """Unpack files into a directory; paths that leave it are refused."""
    with tarfile.open(fileobj=io.BytesIO(zlib.decompress(base64.b64decode(packed)))) as tar:
        tar.extractall(directory, filter="tar")


def pack(directory: str, most: int) -> str | None:
    """Pack the files of a directory; None if they do not fit into the next sandbox.

    A sparse file takes little memory here, but its full size there.
    """
    whole, room = io.BytesIO(), most

    def measured(entry: tarfile.TarInfo) -> tarfile.TarInfo:
        nonlocal room
        room -= -(-entry.size // PAGE) * PAGE
        if room < 0:
            raise OverflowError
        return entry

    try:
        with tarfile.open(fileobj=whole, mode="w") as tar:
            tar.add(directory, arcname=".", filter=measured)
    except OverflowError:
        return None
    return base64.b64encode(zlib.compress(whole.getvalue(), 1)).decode()


def empty(directory: str) -> None:
    """Create a directory, or remove its contents."""
    os.makedirs(directory, exist_ok=True)
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        shutil.rmtree(path) if os.path.isdir(path) and not os.path.islink(path) else os.unlink(path)


class State:
    """The working directory and exported variables of bash, as bash code in an unnamed file.

    A command starts with the state of the previous one, and writes the new state when its shell exits.  A
    command that is killed or sets another EXIT trap leaves the state unchanged.
    """

    END = b"\n: end\n"

    def __init__(self, text: str) -> None:
        self.text = text
        self.file = tempfile.TemporaryFile(dir="/tmp", buffering=0)  # noqa: SIM115, as long as the process
        self.path = f"/proc/self/fd/{self.file.fileno()}"
        leave = f"{{ printf 'cd %q\\n' \"$PWD\"; export -p; echo; echo : end; }} > {self.path}"
        self.file.write(f"{{ {text or ':'}\n}} 2> /dev/null\ntrap {shlex.quote(leave)} EXIT".encode())

    def after(self, most: int) -> str:
        """Return the new state, or the previous one if the new one is missing or exceeds ``most`` bytes."""
        self.file.seek(0)
        left = self.file.read(most + 1) or b""
        whole = left.startswith(b"cd ") and left.endswith(self.END)  # a full disk may have truncated it
        return left.decode(errors="replace") if whole and len(left) <= most else self.text


def run(
    command: str, directory: str, of_image: dict[str, str], seconds: float, most: int, state: State | None
) -> tuple[int | None, bytes]:
    """Run a command; return its exit status (None after a timeout) and the beginning of its output."""
    here = os.path.join(sys.base_prefix, "bin")
    environ = {"HOME": "/tmp", "PATH": f"/usr/local/bin:{here}:/usr/bin:/bin", "LANG": "C.UTF-8", **of_image}
    if state is not None:
        # on one line, so that line numbers in bash's errors stay right
        command = f". {state.path}; {command}"
    process = subprocess.Popen(
        ["/bin/bash", "-c", command], cwd=directory, env=environ, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        pass_fds=[state.file.fileno()] if state is not None else [],
    )  # fmt: skip
    assert process.stdout is not None
    stream, out, until = process.stdout.fileno(), b"", time.monotonic() + seconds
    while time.monotonic() < until and len(out) <= most:
        ready, _, _ = select.select([stream], [], [], 0.05)
        part = os.read(stream, 65_536) if ready else b""
        out += part
        if not part and process.poll() is not None:
            break
        if ready and not part:  # the output is closed, but the command may still run
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            break
    status = process.poll()
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)  # all processes except this one and the sandbox's init
    return status, out[:most]


def play(job: dict[str, Any]) -> tuple[str, str | None]:
    """Run a job; return its result as JSON, and the packed files."""
    directory = str(job["directory"])
    try:
        unpack(directory, str(job["tree"]))
    except Exception:  # a forged result of an earlier command; continue without files
        empty(directory)
    for other, packed in dict(job["others"]).items():  # last, so that no file of the command replaces these
        empty(other)
        if packed:
            unpack(other, packed)
    most, state = int(job["output"]), None if job["state"] is None else State(str(job["state"]))
    status, out = run(
        str(job["command"]), directory, dict(job["environ"]), float(job["seconds"]), most, state
    )
    files = {}
    for path in list(job["reads"]):
        if os.path.isfile(path) and not os.path.islink(path):
            with open(path, "rb") as file:
                files[path] = file.read(most).decode(errors="replace")
    tree = pack(directory, int(job["space"])) if job["keeps"] else ""
    result = {"status": status, "output": out.decode(errors="replace"), "files": files, "full": tree is None}
    if state is not None:
        result["state"] = state.after(int(job["state_size"]))
    return json.dumps(result), tree


result, tree = play(json.loads(sys.stdin.read()))
