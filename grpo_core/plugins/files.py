"""The package of modules that are imported from single files.

The name of such a module contains the path of its file, so a process that ``multiprocessing`` starts by spawn
or forkserver finds the functions of the file as it finds those of an installed package: to import the module
it imports this one first.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

__path__: list[str] = []
FILE_PREFIX = f"{__name__}."
"""Prefix of the name of a module that is imported from a single file."""


def module_name(path: Path) -> str:
    """Return the name of a file's module; two files never share one."""
    return FILE_PREFIX + re.sub(r"[^A-Za-z0-9]", lambda found: f"_{ord(found[0]):x}_", str(path))


class _Finder:
    """Finds the module of a name by the path in it."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(FILE_PREFIX):
            return None
        coded = name.removeprefix(FILE_PREFIX)
        file = Path(re.sub(r"_([0-9a-f]+)_", lambda found: chr(int(found[1], 16)), coded))
        return spec_from_file_location(name, file) if file.is_file() else None


sys.meta_path.append(_Finder)
