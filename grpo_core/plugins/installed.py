"""Finds plugins that are installed as distributions or written in a file."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable
from contextvars import ContextVar
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points, requires
from pathlib import Path
from typing import Any

import grpo_core
from grpo_core import hookspecs
from grpo_core.errors import PluginError
from grpo_core.plugins.offers import Plugin

importing_file: ContextVar[Path | None] = ContextVar("the file that is being imported", default=None)


def installed(reserved: Iterable[str]) -> list[tuple[Plugin, EntryPoint]]:
    """Return every entry point of the group; the distribution distinguishes those of one name.

    ``reserved`` names are in use already.
    """
    entries = [(entry.name, owner.metadata["Name"], entry, owner.version) for entry, owner in _entries()]
    uses = Counter([*reserved, *(name for name, *_ in entries)])
    found = []
    for name, distribution, entry, version in sorted(entries, key=lambda each: each[:2]):
        plugin = Plugin(name=name, distribution=distribution, version=version, module=entry.value)
        if uses[name] > 1:
            plugin.name = f"{distribution}/{name}"
            plugin.note = f"another distribution has a plugin {name!r} too, so this is {plugin.name!r}"
        found.append((plugin, entry))
    return found


def _entries() -> list[tuple[EntryPoint, Distribution]]:
    """Return the entry points of the group, each with its distribution."""
    group = hookspecs.PROJECT
    if sys.version_info >= (3, 10):
        return [(entry, entry.dist) for entry in entry_points(group=group) if entry.dist is not None]
    else:  # where entry points do not tell their distributions
        found: dict[tuple[str, str], tuple[EntryPoint, Distribution]] = {}
        for owner in distributions():
            for entry in owner.entry_points:
                if entry.group == group:  # a distribution hides those of its name later on sys.path
                    found.setdefault((owner.metadata["Name"], entry.name), (entry, owner))
        return list(found.values())


def names_of(plugin: Plugin, entry: EntryPoint) -> set[str]:
    """Return the names by which a list of plugins may select a plugin."""
    return {plugin.name, entry.name, plugin.distribution}


def in_file(name: str) -> tuple[Path, str] | None:
    """Split the name of an offer that is in a file, ``PATH.py`` or ``PATH.py:NAME``; None for any other.

    What follows a word and a colon, as in ``agent:./file.py``, is for the plugin or the prefix of that name.
    """
    if re.match(r"\w+:", name) or (match := re.fullmatch(r"(.+\.py)(?::(.*))?", name)) is None:
        return None
    return Path(match[1]).expanduser(), match[2] or ""


def import_plugin(plugin: Plugin, entry: EntryPoint) -> Any:
    """Check the requirement on grpo-core, which an installation may have ignored, and import the module."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    for requirement in map(Requirement, requires(plugin.distribution) or ()):
        if canonicalize_name(requirement.name) != "grpo-core":
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and not requirement.specifier.contains(grpo_core.__version__, prereleases=True):
            raise PluginError(f"it needs grpo-core{requirement.specifier}, this is {grpo_core.__version__}")
    return entry.load()


def import_file(path: Path) -> Any:
    """Import a file that is not installed.

    Its directory becomes the last place where modules are looked for: the file finds modules next to it,
    and nothing there can hide a module of the standard library or of an installed package.
    """
    from importlib.util import module_from_spec, spec_from_file_location

    if not path.is_file():
        raise PluginError(f"there is no file {path}")
    spec = spec_from_file_location(module_name(path), path)
    assert spec is not None
    assert spec.loader is not None
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = sys.modules[spec.name] = module_from_spec(spec)
    importing = importing_file.set(path)
    try:
        spec.loader.exec_module(module)
    finally:
        importing_file.reset(importing)
    return module


def module_name(path: Path) -> str:
    return "grpo_file_" + re.sub(r"\W", "_", str(path.with_suffix("")))
