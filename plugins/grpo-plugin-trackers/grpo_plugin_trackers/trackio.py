"""The tracker ``trackio``: Trackio's database on this machine, or a Space of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import grpo_core as grpo
from grpo_plugin_trackers.artifacts import log_checkpoint
from grpo_plugin_trackers.examples import COLUMNS, rows


class Trackio(grpo.Tracker):
    """Logs to Trackio; ``trackio show --project PROJECT`` opens its dashboard.

    Args:
        project: name of the project.
        space: id of a Space to log to, as "user/name"; without one, Trackio writes to its own directory
            on this machine, which is ``TRACKIO_DIR`` if that is set.
        completions: number of rollouts in each logged table.
        every: number of steps between two tables.
        group: Trackio's group.
        artifacts: whether to log each checkpoint as a version of an artifact with the run's name.
    """

    def __init__(
        self,
        run: grpo.RunInfo,
        project: str = "grpo-core",
        space: str = "",
        completions: int = 8,
        every: int = 20,
        group: str = "",
        artifacts: bool = False,
    ) -> None:
        self._run = run
        self._project, self._space, self._group = project, space, group
        self._completions, self._every = completions, max(1, every)
        self._artifacts = artifacts
        self._made: Any = None

    @property
    def _writer(self) -> Any:
        """Trackio's run, created on the tracker's thread, because it may wait for a network."""
        if self._made is None:
            import trackio

            self._made = trackio.init(
                self._project,
                name=self._run.name,
                group=self._group or None,
                space_id=self._space or None,
                config=dict(self._run.config),
                # names are not unique, so do not continue another run with this name
                resume="never" if self._run.resumed_from is None else "allow",
                embed=False,  # do not start a dashboard
                auto_log_cpu=False,  # the run's metrics include memory and CPU time of its processes
            )
        return self._made

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._writer.log(dict(values), step=step)

    def rollouts(self, step: int, groups: Sequence[grpo.Group]) -> None:
        if not self._completions or step % self._every:
            return
        import trackio

        found = rows(step, groups, self._completions)
        table = trackio.Table(columns=list(COLUMNS), data=[list(row) for row in found])
        self._writer.log({"rollouts": table}, step=step)

    def event(self, event: grpo.events.Event) -> None:
        if self._artifacts and isinstance(event, grpo.events.Saved):
            import trackio

            log_checkpoint(trackio, self._writer, self._run.name, event)

    def close(self) -> None:
        if self._made is not None:
            self._made.finish()
            self._made = None
