"""The built-in transport of weights, and how the processes of a run find any of them.  Needs no torch."""

from __future__ import annotations

from functools import cache

from grpo_core.errors import ConfigError
from grpo_core.hookspecs import Transport
from grpo_core.plugins.host import PluginHost

SHM = Transport(
    writer="grpo_core.weights.shm:writer",
    reader="grpo_core.weights.shm:read",
)


def find_transport(name: str, plugins: PluginHost) -> Transport:
    """Return a transport by its name.  Raises PluginError or ConfigError if there is none."""
    if ":" in name:  # engines find it by the beginning of a location
        raise ConfigError(f"engine.transport = {name!r}: expected a name without a colon")
    found: Transport = plugins.make("transport", name)
    return found


@cache
def installed_transport(name: str) -> Transport:
    """Return a transport that is installed here.  Raises PluginError if there is none of this name."""
    return find_transport(name, PluginHost.discover())


def transport_of(location: str) -> Transport:
    """Return the transport of published weights: ``NAME:...`` names it, and a path is shared memory."""
    name, named, _ = location.partition(":")
    return installed_transport(name) if named and not location.startswith("/") else SHM
