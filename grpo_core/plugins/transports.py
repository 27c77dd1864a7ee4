"""The built-in transport of weights, and the lookup of transports in a run's processes.  Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.hookspecs import Transport
from grpo_core.plugins.host import PluginHost

SHM = Transport(writer="grpo_core.weights.shm:writer", reader="grpo_core.weights.shm:read")


_found: dict[str, Transport] = {}
"""Transports that this process has found, by name."""


def find_transport(name: str, plugins: PluginHost, options: Mapping[str, Any] = {}) -> Transport:
    """Return a transport by its name.  Raises PluginError or ConfigError if there is none."""
    if ":" in name:  # engines find it by the prefix of a location
        raise ConfigError(f"engine.transport = {name!r}: expected a name without a colon")
    found: Transport = plugins.make("transport", name, **options)
    _found[name] = found
    return found


def transport_of(location: str) -> Transport:
    """Return the transport of published weights: ``NAME:...`` names it, and a path is shared memory.

    Raises PluginError if no allowed plugin offers it here.
    """
    name, named, _ = location.partition(":")
    if not named or location.startswith("/"):
        return SHM
    return _found.get(name) or find_transport(name, PluginHost.discover(elsewhere=True))
