"""Directories of files that a power cut leaves whole or not at all.

When the power fails, a file system may lose whatever was not synced: the bytes of a file, its name in its
directory, a rename, a removal, each with or without the others, in any order (OSDI 2014, Pillai et al.: "All
File Systems Are Not Created Equal").  So everything below a directory is synced before it gets its name, and
its name before anything that it replaces is removed.  ``simulation.disk`` fails in all these ways.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

REPLACED = ".replaced"
"""Ends the name of a directory for the moment in which another takes its place."""


class Disk:
    """What the operating system does at once, and forgets in a power cut unless it is synced."""

    async def run(self, work: Callable[[], T]) -> T:
        """Do something that blocks beside everything else."""
        return await asyncio.to_thread(work)

    def write(self, path: Path, data: bytes) -> None:
        """A file, with the directories above it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)

    def sync(self, path: Path) -> None:
        """Of a file its bytes, of a directory the names in it."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, path: Path, target: Path) -> None:
        path.rename(target)

    def remove(self, directory: Path) -> None:
        """With all that is in it; none is no error."""
        shutil.rmtree(directory, ignore_errors=True)


def seal(disk: Disk, directory: Path) -> dict[str, dict[str, Any]]:
    """Sync all that is below a directory, but not its own names: more may come.

    Returns sha256 and size of each file, by relative name.
    """
    found = {}
    for path in sorted(directory.rglob("*")):
        if not path.is_dir():
            found[str(path.relative_to(directory))] = fingerprint(path)
        disk.sync(path)
    return found


def put(disk: Disk, partial: Path, final: Path) -> None:
    """Give a sealed directory its name; if another had it, there is one of the two at every moment."""
    replaced = final.with_name(final.name + REPLACED)
    if final.exists():
        disk.remove(replaced)
        disk.rename(final, replaced)
    disk.rename(partial, final)
    for directory in (final.parent, final.parent.parent):  # the former may be new itself
        disk.sync(directory)
    disk.remove(replaced)


def fingerprint(path: Path) -> dict[str, Any]:
    with open(path, "rb") as file:
        return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": file.tell()}


def files(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*") if path.is_file())
