"""The tracker ``trackio``: Trackio's database on this machine, or a Space of the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import grpo_core as grpo
from grpo_plugin_trackers.artifacts import Service


class Trackio(Service):
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
        super().__init__(run, "trackio", completions, every, artifacts)
        self._project, self._space, self._group = project, space, group

    def _begun(self, library: Any) -> Any:
        return library.init(
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

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._writer.log(dict(values), step=step)
