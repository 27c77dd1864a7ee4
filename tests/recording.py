"""Sends events through the trackers of a run, as a run does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from grpo_core.config import Config
from grpo_core.contracts.events import Event
from grpo_core.contracts.protocols import Tracker
from grpo_core.plugins.host import PluginHost
from grpo_core.reporting.trackers import Trackers, make_trackers
from grpo_core.storage.run_directory import RunDirectory


def record(path: Path, events: Iterable[Event], config: Config) -> RunDirectory:
    """A run's directory after these events, by the trackers that the configuration selects."""
    run = RunDirectory.create(path, config)
    add(run, events, config)
    return run


def add(run: RunDirectory, events: Iterable[Event], config: Config, resumed_from: int | None = None) -> None:
    """Send the events to a run's trackers, in a new life of the run."""
    host = PluginHost.discover(allow=["report"])
    made = make_trackers(config, host, lambda name: run.info(config, resumed_from))
    tracked(made, lambda trackers: [trackers.emit(event) for event in events])


def tracked(
    trackers: Mapping[str, Tracker], story: Callable[[Trackers], object], *, check: bool = True
) -> None:
    """Tell a story to trackers, in an event loop; what it returns is awaited if it can be."""

    async def main() -> None:
        all_of_them = Trackers()
        all_of_them.add(trackers)
        try:
            told = story(all_of_them)
            if asyncio.iscoroutine(told):
                await told
        finally:
            await all_of_them.close()
        if check:
            all_of_them.check()

    asyncio.run(main())
