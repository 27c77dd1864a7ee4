"""Builds configurations with the sections that plugins add."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_core.config import Config, as_table, build, merge, replace_parts
from grpo_core.config.problems import problems
from grpo_core.contracts.errors import ConfigError
from grpo_core.plugins.host import NO_OFFERS, Offers, PluginHost


def configured(
    layers: Sequence[Mapping[str, Any]],
    block: Sequence[str] = (),
    offers: Offers = NO_OFFERS,
    *,
    stored: bool = False,
) -> tuple[Config, PluginHost]:
    """Build the configuration from tables, later ones over earlier ones; return it and the plugins.

    The plugins are those that the key ``plugins`` allows, and the files that the tables name.

    Args:
        layers: the tables.
        block: plugins that are not loaded.
        offers: objects of the program that calls this.
        stored: read the configuration of a run, whose plugins may not be installed any more.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or a plugin is not installed.
    """
    table: dict[str, Any] = functools.reduce(merge, layers, {})
    allow = table.get("plugins")
    if found := list(problems(list[str] | None, allow, "plugins")):
        raise ConfigError("\n".join(found))
    host = PluginHost.discover(allow, block, elsewhere=stored)
    host.add(offers)
    for name in _names(table):
        host.load_file(name)
    return build([table], host.sections), host


def changed(config: Config, changes: Mapping[str, Any], host: PluginHost) -> Config:
    """Return a configuration with changes, which are a table; the options of a part that is replaced go."""
    for name in _names(changes):
        host.load_file(name)
    return build([replace_parts(as_table(config), changes), changes], host.sections)


def _names(table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of what the tables choose, except environments, which are not loaded here."""
    trackers = table.get("trackers")
    named = [table.get("name"), *(trackers if isinstance(trackers, list) else ())]
    yield from (name for name in named if isinstance(name, str))
    for key, value in table.items():
        if isinstance(value, Mapping) and key not in ("options", "tasks"):
            yield from _names(value)
