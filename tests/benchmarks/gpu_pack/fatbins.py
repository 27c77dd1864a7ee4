"""Finds the device code of a library of CUDA, and blanks what one kind of GPU does not read.

A library has "fatbins": containers with an entry for each architecture.  The payloads of all other entries
become zeros, which compress to nothing.  Headers, sizes and addresses stay, so the loader and the driver find
what they expect; the driver reads only the entry that fits the GPU.  PTX is blanked, too: on another kind of
GPU nothing runs.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterator

MAGIC = 0xBA55ED50
SECTIONS = (".nv_fatbin", "__nv_relfatbin")
WITHOUT_BYTES = 8
"""Kind of a section that takes no bytes of the file (SHT_NOBITS)."""
PTX, MACHINE_CODE = 1, 2
"""Kinds of entries."""
HEAD = 32
"""Least bytes of an entry's header."""
Entry = tuple[int, int, int, int]
"""Kind, architecture, offset and size of a payload."""


class ChangedError(Exception):
    """The wheel is not what this program knows."""


def entries(library: bytes) -> Iterator[Entry]:
    """Yield the entries of all fatbins.  Raises ChangedError if they do not fill their sections exactly."""
    for name, begin, size in _sections(library):
        if name in SECTIONS:
            yield from _of_section(library, name, begin, begin + size)


def blanked(library: bytes, architecture: int) -> tuple[bytes, Counter[str]]:
    """Return the library with the machine code of one architecture, and the bytes that each one has.

    Raises ChangedError if the entries do not fill their sections, or the code that is kept is not the same.
    """
    made = bytearray(library)
    sizes: Counter[str] = Counter()
    for kind, of, offset, size in entries(library):
        sizes[f"{'ptx' if kind == PTX else 'sm'}_{of}"] += size
        if (kind, of) != (MACHINE_CODE, architecture):
            made[offset : offset + size] = bytes(size)
    after = bytes(made)
    if len(after) != len(library) or _kept(after, architecture) != _kept(library, architecture):
        raise ChangedError(f"the code of sm_{architecture} is not the same after the rest was blanked")
    return after, sizes


def _kept(library: bytes, architecture: int) -> list[tuple[int, bytes]]:
    wanted = (MACHINE_CODE, architecture)
    return [(at, library[at : at + size]) for *which, at, size in entries(library) if tuple(which) == wanted]


def _sections(library: bytes) -> Iterator[tuple[str, int, int]]:
    """Yield name, offset and size of each section of an ELF file of 64 bits."""
    if library[:6] != b"\x7fELF\x02\x01":
        raise ChangedError("expected an ELF file of 64 bits, little-endian")
    (table,) = struct.unpack_from("<Q", library, 0x28)
    step, count, names = struct.unpack_from("<HHH", library, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", library, table + place * step) for place in range(count)]
    for name, kind, _, _, offset, size in headers:
        if kind != WITHOUT_BYTES:
            begin = headers[names][4] + name
            yield library[begin : library.index(b"\0", begin)].decode(), offset, size


def _of_section(library: bytes, name: str, at: int, end: int) -> Iterator[Entry]:
    while at < end:
        magic, _, header, body = struct.unpack_from("<IHHQ", library, at)
        if magic != MAGIC:
            if library[at : at + 8] != bytes(8):  # padding between containers
                raise ChangedError(f"{name}: unknown bytes at {at:#x}, expected a container of fatbins")
            at += 8
            continue
        entry, at = at + header, at + header + body
        while entry < at:
            kind, _, head, size = struct.unpack_from("<HHIQ", library, entry)
            if head < HEAD:
                raise ChangedError(f"{name}: unknown bytes at {entry:#x}, expected an entry of a container")
            (architecture,) = struct.unpack_from("<I", library, entry + 28)
            yield kind, architecture, entry + head, size
            entry += head + size
        if entry != at:
            raise ChangedError(f"{name}: the entries of a container end at {entry:#x}, expected {at:#x}")
    if at != end:
        raise ChangedError(f"{name}: the containers end at {at:#x}, expected {end:#x}")
