"""The seccomp filter of a sandbox, which the kernel applies to each system call.

A filter is a BPF program.  Two kinds of calls are refused: calls that hold memory that no process limit
counts (System V shared memory, memory files, and anonymous shared memory, whose pages stay when all but one
of them are unmapped), and calls that judged programs do not need but that can attack the kernel or other
processes.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Sequence

import grpo_core as grpo

MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Supported machines: column of their numbers in the tables below, and AUDIT_ARCH constant."""
ABSENT = {
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "clone3": (435, 435),  # a filter cannot read its flags; libc falls back to clone
}
"""Numbers of calls that return ENOSYS, so that programs fall back to others."""
FORBIDDEN = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "perf_event_open": (298, 241),
    "fanotify_init": (300, 262),
    "open_by_handle_at": (304, 265),
    "vmsplice": (278, 75),  # the pipe keeps pages that the process has unmapped
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
}
"""Numbers of calls that return EPERM."""
CLONE, SOCKET, MMAP = (56, 220), (41, 198), (9, 222)
NAMESPACES = 0x7E020000
"""Flags of clone that create namespaces, in which a program would regain capabilities."""
FAMILIES = (1, 2, 10, 16)
"""Allowed socket families: Unix, IPv4, IPv6 and netlink.  Others, such as vsock, leave the namespace."""
SHARED, ANONYMOUS, PAGE = 0x1, 0x20, 4096
OTHER_NUMBERS = 0x40000000
"""First system call number of the x32 ABI on x86_64."""

LOAD, EQUAL, MORE, FROM, BITS, RETURN = 0x20, 0x15, 0x25, 0x35, 0x45, 0x06
"""BPF instructions: load a word, four comparisons, and return."""
NUMBER, ARCHITECTURE, ARGUMENTS = 0, 4, 16
"""Offsets in ``struct seccomp_data``."""
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000

_Instruction = tuple[int, int, int, int]


def filter_of(machine: str = "") -> bytes:
    """Return the filter for a machine, by default this one.  Raises ConfigError for an unknown machine."""
    machine = machine or platform.machine()
    bits = 8 * struct.calcsize("P")
    if machine not in MACHINES or bits != 64:
        raise grpo.ConfigError(
            f"code: this machine is {machine} with a Python of {bits} bits, and the sandbox knows the "
            f"system calls of {' and '.join(MACHINES)} with 64 bits only. Code of a model is never "
            "run without the filter of system calls: use such a machine"
        )
    column, name = MACHINES[machine]
    code = [(LOAD, 0, 0, ARCHITECTURE), (EQUAL, 1, 0, name), _give(KILL), (LOAD, 0, 0, NUMBER)]
    code += [(FROM, 0, 1, OTHER_NUMBERS), _give(KILL)]
    for table, error in ((ABSENT, errno.ENOSYS), (FORBIDDEN, errno.EPERM)):
        for numbers in table.values():
            code += _when(numbers[column], [_give(ERROR | error)])
    code += _when(CLONE[column], [_argument(0), (BITS, 0, 1, NAMESPACES), _give(ERROR | errno.EPERM)])
    # other families than these are refused
    families = [(EQUAL, len(FAMILIES) - at, 0, family) for at, family in enumerate(FAMILIES)]
    code += _when(SOCKET[column], [_argument(0), *families, _give(ERROR | errno.EAFNOSUPPORT)])
    code += _when(MMAP[column], _mmap())
    return b"".join(struct.pack("=HBBI", *each) for each in [*code, _give(ALLOW)])


def _when(number: int, block: Sequence[_Instruction]) -> list[_Instruction]:
    """Return instructions that run a block for one system call; calls that it does not refuse are allowed."""
    code = [*block, _give(ALLOW)] if len(block) > 1 else list(block)
    return [(EQUAL, 0, len(code), number), *code]


def _mmap() -> list[_Instruction]:
    """Return instructions that refuse anonymous shared memory of more than one page."""
    return [
        _argument(3),
        (BITS, 0, 6, ANONYMOUS),
        (BITS, 0, 5, SHARED),
        _argument(1, high=True),
        (EQUAL, 0, 2, 0),
        _argument(1),
        (MORE, 0, 1, PAGE),
        _give(ERROR | errno.ENOMEM),
    ]


def _argument(number: int, *, high: bool = False) -> _Instruction:
    """Return an instruction that loads half of a 64-bit argument; both machines are little-endian."""
    return (LOAD, 0, 0, ARGUMENTS + 8 * number + 4 * high)


def _give(value: int) -> _Instruction:
    return (RETURN, 0, 0, value)
