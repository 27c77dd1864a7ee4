"""A data plane for tests: a file for each segment and prompt, and a line of ``fetched`` for each fetch."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from grpo_core import DataPlaneError
from grpo_core.kit import RemotePlane


@frozen
class FileReader:
    directory: Path

    def fetch(self, places: Sequence[tuple[str, int]]) -> list[bytes]:
        with (self.directory / "fetched").open("a") as log:
            log.write(json.dumps([os.getpid(), list(places)]) + "\n")
        try:
            return [(self.directory / f"{key}-{part}").read_bytes() for key, part in places]
        except OSError as error:
            raise DataPlaneError(f"data plane of files: {error}") from error


class FilePlane(RemotePlane):
    """Keeps tokens in files.

    Args:
        placement: any.
        directory: where they are.
        room: groups that it takes before it fails; 0: no limit.
    """

    def __init__(self, placement: Any, *, directory: str, room: int = 0) -> None:
        super().__init__()
        self.reader = FileReader(Path(directory))
        self.room, self.taken = room, 0

    async def started(self) -> None:
        self.reader.directory.mkdir(exist_ok=True)

    async def keep(self, key: str, step: int, parts: Sequence[bytes]) -> None:
        self.taken += 1
        if self.taken == self.room:
            raise DataPlaneError("data plane of files: it is full")
        for number, part in enumerate(parts):
            (self.reader.directory / f"{key}-{number}").write_bytes(part)

    def discard(self, keys: Sequence[str]) -> None:
        for key in keys:
            for path in self.reader.directory.glob(f"{key}-*"):
                path.unlink()

    async def forget(self) -> None:
        pass

    @property
    def held(self) -> tuple[int, int]:
        """Segments that are kept, and their bytes."""
        kept = list(self.reader.directory.glob("*-*"))
        return len(kept), sum(path.stat().st_size for path in kept)

    @property
    def fetches(self) -> list[tuple[int, list[tuple[str, int]]]]:
        """Process and places of each fetch."""
        lines = (self.reader.directory / "fetched").read_text().splitlines()
        return [(pid, [(key, part) for key, part in places]) for pid, places in map(json.loads, lines)]
