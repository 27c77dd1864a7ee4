"""Directories and files that survive a power cut as a whole or not at all.

When the power fails, a file system may lose anything that was not synced: the bytes of a file, its name in
its directory, a rename, a removal, each with or without the others, in any order (OSDI 2014, Pillai et al.:
"All File Systems Are Not Created Equal").  Therefore everything below a directory is synced before the
directory gets its name, and the name is synced before the directory that it replaces is removed.  The
simulated disk of the tests fails in all these ways.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

REPLACED = ".replaced"
"""Suffix of a directory while another one replaces it."""


class Disk:
    """File operations whose effects a power cut may undo until they are synced."""

    async def run(self, work: Callable[[], T]) -> T:
        """Run a blocking function in a thread."""
        return await asyncio.to_thread(work)

    def write(self, path: Path, data: bytes) -> None:
        """Write a file, and make the directories above it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def sync(self, path: Path) -> None:
        """Sync the bytes of a file, or the names in a directory."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        path.rename(target)

    def remove(self, directory: Path) -> None:
        """Remove a directory with its contents, or a link or a file in its place; it may be missing.

        Raises OSError if a part of it cannot be removed.
        """
        if directory.is_symlink() or directory.is_file():
            directory.unlink(missing_ok=True)
        while directory.is_dir():
            with contextlib.suppress(FileNotFoundError):  # another process removes it, too
                shutil.rmtree(directory)


def seal(disk: Disk, directory: Path) -> dict[str, dict[str, Any]]:
    """Sync all files and directories below a directory, but not the directory itself.

    Returns the sha256 and size of each file, by relative name.
    """
    found = {}
    for path in sorted(directory.rglob("*")):
        if not path.is_dir():
            found[str(path.relative_to(directory))] = fingerprint(path)
        disk.sync(path)
    return found


def put(disk: Disk, partial: Path, final: Path) -> None:
    """Give a sealed directory its name; at every moment the name belongs to it or to its predecessor."""
    replaced = final.with_name(final.name + REPLACED)
    if os.path.lexists(final):
        disk.remove(replaced)
        disk.rename(final, replaced)
    disk.rename(partial, final)
    for directory in (final.parent, final.parent.parent):  # the parent may be new, too
        disk.sync(directory)
    disk.remove(replaced)


def replace_file(disk: Disk, path: Path, data: bytes) -> None:
    """Give a file new contents; at every moment its name belongs to the old ones or to the new ones."""
    partial = path.with_name(path.name + ".partial")
    disk.write(partial, data)
    disk.sync(partial)
    disk.rename(partial, path)
    disk.sync(path.parent)


def fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": file.tell()}


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
