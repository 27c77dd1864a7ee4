"""Finds plugins and commands that are installed as distributions, and names those that could be installed."""

from __future__ import annotations

import functools
import json
import os
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from importlib.metadata import Distribution, EntryPoint, PackageMetadata, entry_points
from importlib.resources import files
from types import ModuleType
from typing import Any

from attrs import define, field, frozen

from grpo_core.contracts import hookspecs
from grpo_core.contracts.errors import PluginError
from grpo_core.contracts.hookspecs import Command
from grpo_core.plugins.offers import Kind, Plugin

COMMAND_GROUP = "grpo_core.commands"
"""Group of the entry points that name modules with the hook ``grpo_commands``."""
INSTALLS: Mapping[str, Mapping[str, str]] = json.loads(
    files(__package__).joinpath("installs.json").read_text("utf-8")
)
"""Pip's names of our distributions, by kind and by the name of an offer or of its plugin.

``docs/_installs.py`` writes the file from ``plugins/``.
"""
KEYS = INSTALLS["key"]
"""The distributions to install for configuration keys and tables outside of the core."""
COMMANDS = INSTALLS["command"]
"""Our distributions of commands outside of the core."""


@frozen(kw_only=True)
class PluginSelection:
    """Plain data, so that other processes of a run load the same plugins (see ``PluginHost.discover``)."""

    allow: tuple[str, ...] | None = None
    """Names of plugins or distributions that may be loaded; None: all."""
    block: tuple[str, ...] = ()
    """Names of plugins or distributions that are not imported."""
    elsewhere: bool = False
    """Whether it was made for another interpreter, where its plugins may not be installed."""
    directory: str = ""
    """Directory from which relative paths in options count; empty: the working directory."""


ALL_PLUGINS = PluginSelection()


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


def install_command(kind: Kind, name: str) -> str:
    """The command for ``name``, as ``vllm`` or ``math:sort``; empty if unknown."""
    known = INSTALLS.get(kind, {})
    distribution = known.get(name) or known.get(name.partition(":")[0])
    return f"pip install {distribution}" if distribution else ""


# ---------------------------------------------------------------------------------- commands


@define
class Commands:
    """The commands of the core and of the installed plugins."""

    commands: dict[str, Command]
    plugins: list[Plugin] = field(factory=list)
    """The plugins that offer commands, including broken ones."""
    offered: dict[str, Collection[str]] = field(factory=dict)
    """Names of a plugin's commands, by the plugin's name."""


def find_commands(core: ModuleType) -> Commands:
    """Find the commands of the core's module and of the plugins that ``GRPO_PLUGINS`` allows.

    The commands of a plugin are left out if its module cannot be imported, or if a name is in use.
    """
    found, allowed = Commands(offered_commands(core)), allowed_names()
    for entry, owner in entries_of(COMMAND_GROUP):
        plugin = plugin_of(entry, owner.metadata)
        if allowed is not None and not {plugin.name, plugin.distribution} & {*allowed}:
            continue
        try:
            offered = offered_commands(entry.load())
            if twice := sorted(offered.keys() & found.commands.keys()):
                raise PluginError(f"there is another command {twice[0]!r}")
        except Exception as error:  # a broken plugin must not break other commands
            plugin.fault = error
        else:
            found.commands |= offered
            found.offered[plugin.name] = offered.keys()
        found.plugins.append(plugin)
    return found


def names_of_command_plugins() -> set[str]:
    """Return the names by which ``GRPO_PLUGINS`` may allow the plugins that offer commands."""
    return {name for entry, owner in entries_of(COMMAND_GROUP) for name in (entry.name, owner.name)}


def offered_commands(module: ModuleType) -> dict[str, Command]:
    """Return the commands that a module offers.  Raises PluginError if its hook is missing or wrong."""
    hook = getattr(module, "grpo_commands", None)
    if hook is None:
        raise PluginError(f"module {module.__name__} has no hook grpo_commands")
    offered = hook()
    if not isinstance(offered, Mapping) or not all(
        isinstance(name, str) and isinstance(command, Command) for name, command in offered.items()
    ):
        raise PluginError(
            f"{module.__name__}.grpo_commands() returned {offered!r}; expected {{name: Command}}"
        )
    return dict(offered)


def allowed_names() -> list[str] | None:
    """Return the plugins and distributions that ``GRPO_PLUGINS`` names, or None if it is not set."""
    named = os.environ.get("GRPO_PLUGINS")
    return None if named is None else [name.strip() for name in named.split(",") if name.strip()]
