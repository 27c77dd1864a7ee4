"""Which installed plugins the processes of a run load."""

from __future__ import annotations

from attrs import frozen


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
