"""Runs one program inside of the sandbox; the source of this file is passed to the sandbox's Python.

Nothing here is trusted: the model's code runs in the same process and can change anything, including the
output on descriptor 3.  The expected values are not in the sandbox.
"""

import marshal
import os
import resource


def main() -> None:
    """Read a job from descriptor 0, drop all privileges, and run it."""
    os.write(3, b"ready\n")
    job = marshal.loads(exactly(int.from_bytes(exactly(8), "little")))
    limits = job["limits"]
    for name, value in limits["resources"].items():
        most = value + 1 if name == "RLIMIT_CPU" else value  # SIGXCPU identifies the reason; SIGKILL follows
        resource.setrlimit(getattr(resource, name), (value, most))
    if limits["uid"]:
        os.setgroups([])
        os.setresgid(limits["uid"], limits["uid"], limits["uid"])
        os.setresuid(limits["uid"], limits["uid"], limits["uid"])
    os.dup2(4, 0)  # a memory file with the standard input
    os.close(4)
    if job["calls"]:
        import _json  # noqa: F401, for written(); the package json takes a third of the time of Python's start
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
        line = written(found).encode() + b"\n"
        while line:
            line = line[os.write(3, line) :]


def exactly(size: int) -> bytearray:
    """Read exactly ``size`` bytes from descriptor 0."""
    parts = bytearray()
    while len(parts) < size:
        part = os.read(0, size - len(parts))
        if not part:
            os._exit(0)  # closed without a job
        parts += part
    return parts


def written(part: object) -> str:
    """Encode nested lists as JSON."""
    from _json import encode_basestring_ascii as quoted

    if isinstance(part, list):
        return "[" + ", ".join([written(each) for each in part]) + "]"
    if isinstance(part, str):
        return str(quoted(part))
    return "null" if part is None else str(part).lower()


def plain(value: object, depth: int) -> list[object]:
    """Convert a value of built-in types to nested lists; other values become the name of their type."""
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
