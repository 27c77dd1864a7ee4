"""Files of an installed package that its wheel does not hold."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from grpo_plugin_devkit.contracts import Finding

NOT_DATA = (".py", ".pyc", ".pyi", ".so", ".pyd")
CHECK = "its wheel has the files next to its modules"
SHOWN = 5
"""Largest number of files that a finding names."""


def files_in_wheel(module: str, distribution: str) -> Iterator[Finding]:
    """Yield a finding about the data files of a plugin's package; nothing if it has none.

    Args:
        module: name of the plugin's module.
        distribution: name of its distribution.
    """
    spec = importlib.util.find_spec(module.partition(":")[0].partition(".")[0])
    for package in map(Path, (spec and spec.submodule_search_locations) or ()):
        files = [path for path in sorted(package.rglob("*")) if path.is_file() and _is_data(path, package)]
        left_out = [path for path in files if not _in_wheel(path, package, distribution)]
        if left_out:
            names = [str(path.relative_to(package)) for path in left_out]
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            yield Finding(
                CHECK,
                "noted",
                f"it lacks {', '.join(names[:SHOWN])}{more} of {package.name}, so installed code cannot read "
                "them: name them in [tool.setuptools.package-data] of pyproject.toml",
            )
        elif files:
            yield Finding(CHECK, "passed", f"{len(files)} files of {package.name} that are no modules")


def _is_data(path: Path, package: Path) -> bool:
    parts = path.relative_to(package).parts
    return (
        path.suffix not in NOT_DATA
        and path.name != "py.typed"
        and not any(part.startswith((".", "__pycache__")) for part in parts)
    )


def _in_wheel(path: Path, package: Path, distribution: str) -> bool:
    """Whether the wheel of the sources holds a file, or the installed one does."""
    root = next((each for each in package.parents[:2] if (each / "pyproject.toml").is_file()), None)
    if root is None:
        installed = importlib.metadata.files(distribution) or ()
        return any(Path(file.locate()).resolve() == path.resolve() for file in installed)
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))
    backend = project.get("build-system", {}).get("build-backend", "setuptools.build_meta")
    if not backend.startswith("setuptools"):
        return True  # hatchling, flit, poetry and uv take all files of a package
    manifest = root / "MANIFEST.in"
    if manifest.is_file() and any(fnmatch(path.name, word) for word in manifest.read_text().split()):
        return True
    return _matches(path, package, project.get("tool", {}).get("setuptools", {}).get("package-data", {}))


def _matches(path: Path, package: Path, patterns: dict[str, Any]) -> bool:
    """Whether a pattern of package data holds a file; "*" stands for all packages."""
    for name, globs in patterns.items():
        for parent in path.parents:
            if not parent.is_relative_to(package):
                break
            dotted = ".".join([package.name, *parent.relative_to(package).parts])
            if name in ("*", dotted) and any(path in parent.glob(each) for each in globs):
                return True
    return False
