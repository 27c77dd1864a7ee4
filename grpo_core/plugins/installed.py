"""Finds plugins that are installed as distributions."""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import Distribution, EntryPoint, PackageMetadata, entry_points
from typing import Any

from attrs import frozen

from grpo_core.contracts import hookspecs
from grpo_core.contracts.errors import PluginError
from grpo_core.plugins.offers import Plugin


@frozen
class Installed:
    """A plugin of an installed distribution."""

    plugin: Plugin
    entry: EntryPoint
    requirements: tuple[str, ...]
    """The requirements of its distribution."""

    @property
    def names(self) -> set[str]:
        """Names that select it in a list of plugins."""
        return {self.plugin.name, self.entry.name, self.plugin.distribution}


def entries_of(group: str) -> tuple[tuple[EntryPoint, Distribution], ...]:
    """Return the entry points of a group with their distributions, by name.

    All distributions are read again only when a directory that Python searches has changed.
    """
    paths = [os.path.abspath(path) for path in sys.path]
    searched = tuple((path, os.stat(path).st_mtime_ns) for path in paths if os.path.exists(path))
    return _entries_of(group, searched)


@functools.cache
def _entries_of(group: str, searched: object) -> tuple[tuple[EntryPoint, Distribution], ...]:
    found = sorted(entry_points(group=group), key=lambda entry: entry.name)
    return tuple((entry, entry.dist) for entry in found if entry.dist is not None)


def plugin_of(entry: EntryPoint, about: PackageMetadata) -> Plugin:
    """Return the plugin of an entry point, without its offers."""
    return Plugin(name=entry.name, distribution=about["Name"], version=about["Version"], module=entry.value)


def installed(reserved: Iterable[str]) -> list[Installed]:
    """Return every entry point of the group; the distribution distinguishes equal names.

    ``reserved`` names are in use already.
    """
    entries = []
    for entry, owner in entries_of(hookspecs.PROJECT):
        about = owner.metadata  # each access reads the file
        required = about.get_all("Requires-Dist") or owner.requires or ()
        entries.append(Installed(plugin_of(entry, about), entry, tuple(required)))
    uses = Counter([*reserved, *(each.entry.name for each in entries)])
    for each in entries:
        plugin, name = each.plugin, f"{each.plugin.distribution}/{each.entry.name}"
        if uses[each.entry.name] > 1:
            plugin.note = f"another distribution has a plugin {each.entry.name!r}, so this one is {name!r}"
            plugin.name = name
    return sorted(entries, key=lambda each: (each.entry.name, each.plugin.distribution))


def import_plugin(plugin: Installed) -> Any:
    """Check the plugin's requirement on grpo-core, which pip may have ignored, and import the module."""
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    from grpo_core._version import __version__

    for requirement in map(Requirement, plugin.requirements):
        if canonicalize_name(requirement.name) != "grpo-core":
            continue
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if applies and not requirement.specifier.contains(__version__, prereleases=True):
            raise PluginError(f"it needs grpo-core{requirement.specifier}, this is {__version__}")
    return plugin.entry.load()
