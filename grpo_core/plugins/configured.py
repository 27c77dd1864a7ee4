"""Builds configurations with the sections that plugins add, and finds the section of the model."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from attrs import evolve

from grpo_core.config import Config, as_table, build, merge, replace_parts
from grpo_core.config.reading import problems
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.records import WithSections
from grpo_core.plugins.files import FILE_PREFIX, load_object
from grpo_core.plugins.host import NO_OFFERS, Offers, PluginHost
from grpo_core.plugins.installed import PluginSelection
from grpo_core.plugins.values import absolute


def configured(
    layers: Sequence[Mapping[str, Any]],
    block: Sequence[str] = (),
    offers: Offers = NO_OFFERS,
    *,
    stored: bool = False,
) -> tuple[Config, PluginHost]:
    """Build the configuration from tables, where later ones override earlier ones, and its plugins.

    The plugins are the ones that the key ``plugins`` allows, and the files that the tables name.

    Args:
        layers: the tables.
        block: plugins that are not loaded.
        offers: objects of the calling program.
        stored: read the configuration of a run, whose plugins may have been uninstalled.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or a plugin is not installed.
    """
    table: dict[str, Any] = functools.reduce(merge, layers, {})
    allow, directory = table.get("plugins"), table.get("directory") or ""
    if found := [*problems(list[str] | None, allow, "plugins"), *problems(str, directory, "directory")]:
        raise ConfigError("\n".join(found))
    host = PluginHost.discover(allow, block, elsewhere=stored)
    host.selection = evolve(host.selection, directory=absolute(directory))
    host.add(offers)
    for name in _names(table):
        host.load_file(name)
    return build([table], host.sections), host


def host_of(config: Config | TrainerSetup, block: Sequence[str] = ()) -> PluginHost:
    """Load the plugins that a configuration, or the setup of a trainer, allows."""
    allow = None if config.plugins is None else tuple(config.plugins)
    selection = PluginSelection(allow=allow, block=tuple(block), directory=config.directory)
    return PluginHost.of(selection)


def changed(config: Config, changes: Mapping[str, Any], host: PluginHost) -> Config:
    """Return a configuration with a table of changes; the options of a replaced part are dropped."""
    for name in _names(changes):
        host.load_file(name)
    return build([replace_parts(as_table(config), changes), changes], host.sections)


def _names(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of chosen offers, except environments, which are not loaded here."""
    trackers = table.get("trackers")
    named = [table.get("name"), *(trackers if isinstance(trackers, list) else ())]
    yield from (name for name in named if isinstance(name, str))
    for key, value in table.items():
        if isinstance(value, Mapping) and key not in ("options", "tasks"):
            yield from _names(value)


@runtime_checkable
class ModelSection(Protocol):
    """A section ``model.NAME`` of an installed plugin, whose checkpoints are a part of a model."""

    fixed: Sequence[str]
    """Keys that keep their values in all starts of a run, as ``"model.lora.rank"``."""

    def check(self, config: Config) -> None:
        """Raise ConfigError if the run cannot have this section; called before a process starts."""
        ...


def model_section(config: WithSections) -> ModelSection | None:
    """Return the section that defines how the trainer holds its model; None: it trains all weights."""
    for each in config.sections:
        if each.name.startswith("model.") and not each.kind.startswith(FILE_PREFIX):
            section = config.section(load_object(each.kind, who="section"))
            if isinstance(section, ModelSection):
                return section
    return None
