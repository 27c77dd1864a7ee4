"""An environment's process for an audit: as in a run, and it tells what it has touched."""

from __future__ import annotations

from grpo_core.environments.sourced import SourcedProcess


class WatchedProcess(SourcedProcess):
    """A ``SourcedProcess`` whose child records files and sockets (``grpo_core.audit.watch``)."""

    HOST = "grpo_core.audit.watch:WatchedHost"

    async def watched(self) -> list[dict[str, str]]:
        """Return the events of the running child."""
        child = await self._started()
        found: list[dict[str, str]] = await child.call("watched", seconds=self._config.start_deadline)
        return found
