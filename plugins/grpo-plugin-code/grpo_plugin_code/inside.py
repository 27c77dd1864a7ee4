"""Runs one program inside of the sandbox; the text of this file is given to the sandbox's Python.

Nothing here is trusted: the model's code runs in the same process, and may do what it likes with it.  It can
change what is written to descriptor 3, but the expected values are not in the sandbox.
"""

import marshal
import os
import resource


def main() -> None:
    """Read a job from descriptor 0, give up all rights, and run it."""
    os.write(3, b"ready\n")
    job = marshal.loads(exactly(int.from_bytes(exactly(8), "little")))
    given = os.memfd_create("stdin")
    rest = memoryview(job["stdin"].encode())
    while rest:  # before the limits, of which one would end the text at the size of a file
        rest = rest[os.write(given, rest) :]
    limits = job["limits"]
    for name, value in limits["resources"].items():
        most = value + 1 if name == "RLIMIT_CPU" else value  # SIGXCPU tells why; SIGKILL follows
        resource.setrlimit(getattr(resource, name), (value, most))
    if limits["uid"]:
        os.setgroups([])
        os.setresgid(limits["uid"], limits["uid"], limits["uid"])
        os.setresuid(limits["uid"], limits["uid"], limits["uid"])
    os.lseek(given, 0, 0)
    os.dup2(given, 0)
    os.close(given)
    if job["calls"]:
        import json  # which takes a third of the time of Python's start
    else:
        os.close(3)
    code = compile(job["code"], "solution.py", "exec", dont_inherit=True)
    space = {"__name__": "__main__" if not job["calls"] else "solution", "__builtins__": __builtins__}
    exec(code, space)
    for call in job["calls"]:
        try:
            found = plain(eval(call, space), 100)
        except Exception as error:
            found = ["error", type(error).__name__ + ": " + str(error)[:200]]
        line = json.dumps(found).encode() + b"\n"
        while line:
            line = line[os.write(3, line) :]


def exactly(size: int) -> bytearray:
    """Read a number of bytes from descriptor 0."""
    parts = bytearray()
    while len(parts) < size:
        part = os.read(0, size - len(parts))
        if not part:
            os._exit(0)  # the sandbox was not needed
        parts += part
    return parts


def plain(value: object, depth: int) -> list[object]:
    """Return a value of Python's own types as nested lists; others have only the name of their type."""
    kind = type(value)
    if depth == 0:
        return ["other", "too deep"]
    if kind in (bool, str, type(None)):
        return [kind.__name__, value]
    if type(value) is int:
        return ["int", hex(value)]
    if type(value) is float:
        return ["float", value.hex()]
    if type(value) is bytes:
        return ["bytes", value.hex()]
    if type(value) is complex:
        return ["complex", [value.real.hex(), value.imag.hex()]]
    if type(value) is dict:
        return ["dict", [[plain(k, depth - 1), plain(v, depth - 1)] for k, v in value.items()]]
    if kind in (list, tuple, set, frozenset) and isinstance(value, list | tuple | set | frozenset):
        return [kind.__name__, [plain(each, depth - 1) for each in value]]
    return ["other", kind.__name__]


main()
