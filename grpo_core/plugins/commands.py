"""Finds the commands of the core and of installed plugins."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from types import ModuleType

from attrs import define, field

from grpo_core.contracts.errors import PluginError
from grpo_core.contracts.hookspecs import Command
from grpo_core.plugins.installed import entries_of, plugin_of
from grpo_core.plugins.offers import Plugin

GROUP = "grpo_core.commands"
"""Group of the entry points that name modules with the hook ``grpo_commands``."""


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
    for entry, owner in entries_of(GROUP):
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
    return {name for entry, owner in entries_of(GROUP) for name in (entry.name, owner.name)}


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
