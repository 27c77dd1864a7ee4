"""Starts podman, and holds the leash of its container; the text of this file is a program of its own.

A container outlives the podman that has started it.  But its first process waits for the end of a pipe
(see ``container_guard.py``), of which only this process has the other end: the container ends with it.
"""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
LEASH = 5


def main(words: list[str], environ: dict[str, str]) -> None:
    """Run podman to its end; it gives the container descriptors 3 (values), 4 (input) and 5 (the leash)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    leash, _ = os.pipe()
    # root drops its rights in inside.py; others have ids of their own in a container, up to 65,535
    uid = 1000 + os.getpid() % 60_000 if os.geteuid() else 0
    actions = [(os.POSIX_SPAWN_DUP2, leash, LEASH)]
    podman = os.posix_spawn(words[0], [*words, str(uid)], environ, file_actions=actions)
    code = os.waitstatus_to_exitcode(os.waitpid(podman, 0)[1])
    os._exit(code if code >= 0 else 128 - code)
