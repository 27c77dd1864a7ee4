"""Prepares a sandbox: descriptors for values and input, the filter of system calls, user ids, and the job.

A sandbox reads its job from descriptor 0, writes values to 3, and reads the program's input from 4.

The kernel does not limit the processes of root, so each program that root starts gets a separate user id.
Root of a container can only use ids that are mapped in its user namespace, which may be none.
"""

from __future__ import annotations

import fcntl
import functools
import marshal
import os
import random
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from grpo_plugin_code.calls import filter_of

FILTER = "{filter}"
"""Placeholder in a command for the descriptor of the filter of system calls."""
STARTING = 60.0
"""Time limit for the start of a sandbox in seconds."""

PROCESSES = 8
TRIAL = f"""
import os
try:
    for _ in range({PROCESSES}):
        if os.fork() == 0:
            os.read(os.pipe()[0], 1)
except OSError:
    os._exit(0)
raise SystemExit("the kernel does not limit the processes of this user, who is root of the machine")
"""
"""A program that succeeds if the limit of processes works."""

PREFERRED = range(200_000, 260_000)
"""Ids that are usually unused."""
LOWEST, NOBODY = 10_000, 65_534
"""Bounds of the ids used in a container: above its users, below nobody."""
FEWEST = 1000
"""Smallest usable range of ids: concurrent programs must not share an id."""
ROUND = 4096
"""Number of ids that are drawn at a time."""


def ids_of_sandboxes() -> range:
    """Return the ids for programs; empty if this process is not root or cannot change its id."""
    if os.geteuid() != 0 or _read("setgroups").strip() == "deny":
        return range(0)
    return chosen(_read("uid_map"), _read("gid_map"))


def chosen(users: str, groups: str) -> range:
    """Return the ids mapped by both the user and group map of a namespace, as in /proc/self/uid_map."""
    both = [
        range(max(user.start, group.start), min(user.stop, group.stop))
        for user in _ranges(users)
        for group in _ranges(groups)
    ]
    if any(PREFERRED[0] in each and PREFERRED[-1] in each for each in both):
        return PREFERRED
    usable = [range(max(each.start, LOWEST), each.stop) for each in both]
    usable = [range(each.start, NOBODY) if NOBODY in each else each for each in usable]
    return max((each for each in usable if len(each) >= FEWEST), key=len, default=range(0))


def in_random_order(ids: Sequence[int]) -> Iterator[int]:
    """Yield ids endlessly in random order.

    The kernel counts the processes of a user id on the whole machine, so programs of two runs should not
    share an id.
    """
    drawn = random.SystemRandom()
    while True:
        yield from drawn.sample(ids, min(ROUND, len(ids)))


def _ranges(text: str) -> list[range]:
    lines = [list(map(int, line.split())) for line in text.splitlines()]
    return [range(begin, begin + count) for begin, _, count in lines]


def _read(name: str) -> str:
    path = Path("/proc/self") / name
    return path.read_text() if path.exists() else ""


def empty_input() -> int:
    """Return the descriptor of a memory file for the input of a program."""
    return os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def fill(given: int, text: str) -> None:
    """Write the input of a program and seal the file against changes."""
    rest, at = memoryview(text.encode(errors="replace")), 0
    while at < len(rest):
        at += os.pwrite(given, rest[at:], at)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(given, fcntl.F_ADD_SEALS, seals)


def filter_to_read() -> int:
    """Return the descriptor of a pipe that contains the filter of system calls."""
    reading, writing = os.pipe()
    os.write(writing, filter_of())  # fits into the buffer of a pipe
    os.close(writing)
    return reading


def with_descriptors(words: Sequence[str], given: tuple[int, int], allowed: int) -> list[str]:
    """Return a command that passes these descriptors to the program as 3 (values) and 4 (input).

    Args:
        words: the command, with Python source as its last word.
        given: the two descriptors.
        allowed: descriptor of the filter of system calls.
    """
    program = f"import os\n_both = [os.dup({given[0]}), os.dup({given[1]})]\n"
    program += f"for _each in {[each for each in given if each > 2]}: os.close(_each)\n"
    program += "for _at, _each in enumerate(_both, 3): os.dup2(_each, _at); os.set_inheritable(_at, True)\n"
    program += "for _each in _both: os.close(_each) if _each > 4 else None\n"
    return [*(str(allowed) if word == FILTER else word for word in words[:-1]), program + words[-1]]


def framed(code: str, calls: Sequence[str], resources: Mapping[str, int], user: int) -> bytes:
    """Encode a job.

    Args:
        code: Python source.
        calls: expressions to evaluate after the code.
        resources: resource limits of each process, by name.
        user: user id of the program; 0 keeps the current one.
    """
    limits = {"resources": dict(resources), "uid": user}
    body = marshal.dumps({"code": code, "calls": list(calls), "limits": limits})
    return len(body).to_bytes(8, "little") + body  # sandboxes run this Python, so marshal's format fits


@functools.cache
def fault_of(words: tuple[str, ...]) -> str:
    """Test a sandbox command with a trial program; return the error, or an empty text.

    The trial has the privileges and user id of any program.  It tests the limit of processes, because the
    kernel does not apply it to root, which root of a user namespace may be mapped to.
    """
    ids = ids_of_sandboxes()
    user = next(in_random_order(ids)) if ids else 0
    given, allowed = empty_input(), filter_to_read()
    try:
        tried = subprocess.run(
            with_descriptors(words, (2, given), allowed),
            input=framed(TRIAL, (), {"RLIMIT_NPROC": PROCESSES}, user),
            capture_output=True,
            pass_fds=[given, allowed],
            timeout=STARTING,
            env={},
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not run: {error}"
    finally:
        os.close(given)
        os.close(allowed)
    if tried.returncode == 0:
        return ""
    errors = tried.stderr.decode(errors="replace").strip()[-300:]
    return errors or f"it ends with exit status {tried.returncode}"
