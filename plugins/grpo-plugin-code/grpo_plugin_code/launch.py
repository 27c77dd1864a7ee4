"""Makes what a sandbox starts with: descriptors for values and input, a filter of system calls, a job.

A sandbox reads its job from descriptor 0, writes values to 3, and finds the program's input in 4.
"""

from __future__ import annotations

import fcntl
import functools
import marshal
import os
import subprocess
from collections.abc import Mapping, Sequence

from grpo_plugin_code.calls import filter_of
from grpo_plugin_code.users import ids_of_sandboxes, in_random_order

FILTER = "{filter}"
"""Word of a command in whose place the descriptor of the filter of system calls comes."""
STARTING = 60.0
"""Seconds in which a sandbox has to be ready."""

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
"""A program that ends well if it can start no more processes than its limit."""


def empty_input() -> int:
    """Return the descriptor of a file in memory for the input of a program."""
    return os.memfd_create("stdin", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def fill(given: int, text: str) -> None:
    """Write the input of a program, which cannot change it then."""
    rest, at = memoryview(text.encode(errors="replace")), 0
    while at < len(rest):
        at += os.pwrite(given, rest[at:], at)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(given, fcntl.F_ADD_SEALS, seals)


def filter_to_read() -> int:
    """Return a descriptor from which the filter of system calls is read once."""
    reading, writing = os.pipe()
    os.write(writing, filter_of())  # which has room in a pipe
    os.close(writing)
    return reading


def with_descriptors(words: Sequence[str], given: tuple[int, int], allowed: int) -> list[str]:
    """Return the command with these descriptors as numbers 3 (values) and 4 (input) of the program.

    Args:
        words: the command, whose last word is a program of Python.
        given: the two descriptors.
        allowed: the descriptor of the filter of system calls.
    """
    program = f"import os\n_both = [os.dup({given[0]}), os.dup({given[1]})]\n"
    program += f"for _each in {[each for each in given if each > 2]}: os.close(_each)\n"
    program += "for _at, _each in enumerate(_both, 3): os.dup2(_each, _at); os.set_inheritable(_at, True)\n"
    program += "for _each in _both: os.close(_each) if _each > 4 else None\n"
    return [*(str(allowed) if word == FILTER else word for word in words[:-1]), program + words[-1]]


def framed(code: str, calls: Sequence[str], resources: Mapping[str, int], user: int) -> bytes:
    """Return the bytes of a job.

    Args:
        code: Python source.
        calls: expressions to evaluate after the code.
        resources: limits that the operating system keeps for each process.
        user: id that the program takes; 0 leaves it.
    """
    limits = {"resources": dict(resources), "uid": user}
    body = marshal.dumps({"code": code, "calls": list(calls), "limits": limits})
    return len(body).to_bytes(8, "little") + body  # the sandbox's Python is this one


@functools.cache
def fault_of(words: tuple[str, ...]) -> str:
    """Run a program on trial with a command; return what the sandbox says if it does not end well.

    The program takes the rights and the user id of any other.  The limit of processes does not hold for root
    of the machine, which root of a user namespace may be, too.
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
    said = tried.stderr.decode(errors="replace").strip()[-300:]
    return said or f"it ends with exit status {tried.returncode}"
