"""Guards a container as its first process, with which it ends; ``inside.py`` follows in the same program."""

import _thread
import ctypes
import os
import struct
import sys

LEASH = 5
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


def refuse(calls: bytes) -> None:
    """Give this process the filter of system calls, beside that of the container (see ``calls.py``)."""
    kept = ctypes.create_string_buffer(calls, len(calls))
    program = struct.pack("HxxxxxxQ", len(calls) // 8, ctypes.addressof(kept))
    library = ctypes.CDLL(None, use_errno=True)
    library.prctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_char_p]
    if library.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program):
        raise OSError(ctypes.get_errno(), "the kernel takes no filter of system calls")


def guard(uid: int, calls: bytes) -> None:
    """Return in a child process with this user id; end when it ends, or when nobody holds the leash."""
    child = os.fork()
    if not child:
        os.close(LEASH)
        if uid:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        refuse(calls)
        return
    _thread.start_new_thread(lambda: (os.read(LEASH, 1), os._exit(137)), ())
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


guard(int(sys.argv.pop()), bytes.fromhex(sys.argv.pop()))
