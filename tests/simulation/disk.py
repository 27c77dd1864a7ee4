"""A disk that fills up, dies between two operations, and forgets in a power cut what was not synced.

It does everything on a real directory, for readers to find, and keeps account beside it of what is durable.
A power cut then leaves of each file that was not synced nothing or a part; and of the names in each directory
that was not synced any subset of the changes: a new file, a rename (both names or neither), a removal.
"""

from __future__ import annotations

import errno
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

from attrs import define, field, frozen

from grpo_core.storage.disk import Disk


class Dead(BaseException):
    """The process, or the machine, is gone in the middle of an operation."""


@define(eq=False)
class _File:
    now: bytes = b""
    durable: bytes = b""


@frozen
class _Change:
    """A change of the names in one directory: ``name`` is another node or (None) gone, and so is ``old``."""

    name: str
    node: _File | _Directory | None
    old: str | None = None


@define(eq=False)
class _Directory:
    now: dict[str, _File | _Directory] = field(factory=dict)
    durable: dict[str, _File | _Directory] = field(factory=dict)
    changes: list[_Change] = field(factory=list)
    """Not synced, in order."""

    def change(self, change: _Change) -> None:
        _apply(self.now, change)
        self.changes.append(change)


def _apply(names: dict[str, _File | _Directory], change: _Change) -> None:
    if change.old is not None:
        names.pop(change.old, None)
    if change.node is None:
        names.pop(change.name, None)
    else:
        names[change.name] = change.node


class FaultyDisk(Disk):
    """``grpo_core.storage.disk.Disk`` below ``root``, with faults.

    Args:
        root: a directory; itself durable, with all that is in it.
        before: the disk of a process that was killed here: what it did not sync is not durable.
        dies_at: the number of the operation in the middle of which ``Dead`` is raised, from 1; 0: none.
        room: bytes that can be written before the disk is full; None: any number.
    """

    def __init__(
        self, root: Path, *, before: FaultyDisk | None = None, dies_at: int = 0, room: int | None = None
    ) -> None:
        self.root, self.dies_at, self.room = root, dies_at, room
        self.operations = 0
        self.dead = False
        root.mkdir(parents=True, exist_ok=True)
        self._top: _Directory = before._top if before else _read(root)

    def write(self, path: Path, data: bytes) -> None:
        dies = self._dies()
        whole = data
        if dies:
            data = data[: len(data) // 2]
        elif self.room is not None:
            data = data[: self.room]
            self.room -= len(data)
        directory = self._directory(path.parent)
        file = directory.now.get(path.name)
        if not isinstance(file, _File):
            file = _File()
            directory.change(_Change(path.name, file))
        file.now = data
        super().write(path, data)
        if dies:
            self.die()
        if len(data) < len(whole):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))

    def sync(self, path: Path) -> None:
        if self._dies():
            self.die()
        node = self._find(path)
        if isinstance(node, _File):
            node.durable = node.now
        else:
            node.durable = dict(node.now)
            node.changes.clear()

    def rename(self, path: Path, target: Path) -> None:
        if self._dies():
            self.die()
        assert path.parent == target.parent
        directory = self._directory(path.parent)
        directory.change(_Change(target.name, directory.now[path.name], old=path.name))
        super().rename(path, target)

    def remove(self, directory: Path) -> None:
        """Name by name, so that a death in the middle leaves some of them."""
        dies = self._dies()
        above = self._directory(directory.parent)
        node = above.now.get(directory.name)
        if isinstance(node, _Directory):
            names = [*_below(node, directory), (above, directory)]
            for inside, path in names[: len(names) // 2] if dies else names:
                inside.change(_Change(path.name, None))
                if dies:
                    path.rmdir() if path.is_dir() else path.unlink()
            if not dies:
                super().remove(directory)
        if dies:
            self.die()

    def rot(self, path: Path, chance: random.Random) -> None:
        """A bit of a file changes by itself."""
        data = bytearray(path.read_bytes())
        data[chance.randrange(len(data))] ^= 1
        path.write_bytes(data)
        file = self._find(path)
        assert isinstance(file, _File)
        file.now = file.durable = bytes(data)

    # ------------------------------------------------------------------------------ death

    def die(self) -> None:
        self.dead = True
        raise Dead

    def cut_power(self, chance: random.Random) -> None:
        """Leave on the directory what survives; ``chance`` decides of all that was not synced."""
        self.dead = True
        shutil.rmtree(self.root)
        _lose(self._top, chance)
        _write(self._top, self.root)
        self._top = _read(self.root)

    def _dies(self) -> bool:
        if self.dead:
            raise Dead
        self.operations += 1
        return self.operations == self.dies_at

    # ------------------------------------------------------------------------------ the account

    def _directory(self, path: Path) -> _Directory:
        """Made if it is not there."""
        node = self._top
        for name in path.parts[len(self.root.parts) :]:
            inner = node.now.get(name)
            if not isinstance(inner, _Directory):
                inner = _Directory()
                node.change(_Change(name, inner))
            node = inner
        return node

    def _find(self, path: Path) -> _File | _Directory:
        if path == self.root:
            return self._top
        return self._directory(path.parent).now[path.name]


def _below(directory: _Directory, path: Path) -> Iterator[tuple[_Directory, Path]]:
    """All names below a directory, the deepest first, and what each is a name in."""
    for name, node in list(directory.now.items()):
        if isinstance(node, _Directory):
            yield from _below(node, path / name)
        yield directory, path / name


def _read(directory: Path) -> _Directory:
    """Read a directory; everything that is there is durable."""
    found: dict[str, _File | _Directory] = {}
    for path in sorted(directory.iterdir()):
        found[path.name] = _read(path) if path.is_dir() else _File(*[path.read_bytes()] * 2)
    return _Directory(found, dict(found))


def _lose(directory: _Directory, chance: random.Random) -> None:
    for change in directory.changes:
        if chance.random() < 0.5:
            _apply(directory.durable, change)
    for node in directory.durable.values():
        if isinstance(node, _Directory):
            _lose(node, chance)
        elif node.durable != node.now and chance.random() < 0.5:
            node.durable = node.now[: chance.randrange(len(node.now) + 1)]


def _write(directory: _Directory, path: Path) -> None:
    path.mkdir()
    for name, node in directory.durable.items():
        if isinstance(node, _Directory):
            _write(node, path / name)
        else:
            (path / name).write_bytes(node.durable)
