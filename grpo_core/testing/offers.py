"""Makes the offers of installed plugins by name, and binds others, for tests of a plugin."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_core.contracts.hookspecs import Function, Offer
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.offers import Bound, Kind, Plugin, Selected, as_offer


def make_offer(
    kind: Kind, name: str, *args: Any, plugins: Sequence[str] | None = None, **options: Any
) -> Any:
    """Make what is offered as ``name``, after the checks that a configuration's options pass.

    Args:
        kind: "environment", "sampler", "engine", ...
        name: as in a configuration, for example ``"math:sort"``.
        plugins: names of the plugins that may be loaded; None: all that are installed.

    Raises PluginError if there is no such offer, if its plugin is broken, or for options that it does not
    have.
    """
    return PluginHost.discover(plugins).make(kind, name, *args, **options)


def bound(kind: Kind, function: Function | Offer, options: Mapping[str, Any]) -> Bound[Any, Any]:
    """A function that no plugin offers, with its options, as a run calls it."""
    plugin = Plugin(name="checked", distribution="", version="", module="")
    selected = Selected(kind, "checked", plugin, as_offer(kind, function))
    return Bound(selected, selected.load(), options)
