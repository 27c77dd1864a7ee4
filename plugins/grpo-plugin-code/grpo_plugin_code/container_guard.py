"""Guards a container as its first process, with which it ends; ``inside.py`` follows in the same program."""

import _thread
import os
import sys

LEASH = 4


def guard(uid: int) -> None:
    """Return in a child process with this user id; end when it ends, or when nobody holds the leash."""
    child = os.fork()
    if not child:
        os.close(LEASH)
        if uid:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
        return
    _thread.start_new_thread(lambda: (os.read(LEASH, 1), os._exit(137)), ())
    while True:
        ended, status = os.wait()
        if ended == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


guard(int(sys.argv.pop()))
