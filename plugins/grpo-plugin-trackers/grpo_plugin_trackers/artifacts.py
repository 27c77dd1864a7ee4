"""Tables of rollouts, and checkpoints as artifacts, by the common interface of W&B and Trackio."""

from __future__ import annotations

import importlib
import logging
import re
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grpo_core as grpo
from grpo_plugin_trackers.examples import COLUMNS, rows

log = logging.getLogger("grpo_core")


class Service(grpo.Tracker):
    """Base class of the trackers that log to a run of ``wandb`` or ``trackio``.

    Args:
        library: name of the module.
        completions: number of rollouts in each logged table.
        every: number of steps between two tables.
        artifacts: whether to log each checkpoint as a version of an artifact with the run's name.
    """

    def __init__(
        self, run: grpo.RunInfo, library: str, completions: int, every: int, artifacts: bool
    ) -> None:
        self._run, self._library, self._artifacts = run, library, artifacts
        self._completions, self._every = completions, max(1, every)
        self._made: Any = None

    @property
    def _writer(self) -> Any:
        """The library's run, created on the tracker's thread, because it may wait for a network."""
        if self._made is None:
            self._made = self._begun(importlib.import_module(self._library))
        return self._made

    @abstractmethod
    def _begun(self, library: Any) -> Any:
        """Return a new run of the library."""

    @abstractmethod
    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        """Log values of a step."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        self._log(step, values)

    def rollouts(self, step: int, groups: Sequence[grpo.Group]) -> None:
        if self._completions and step % self._every == 0:
            found = [list(row) for row in rows(step, groups, self._completions)]
            table = importlib.import_module(self._library).Table(columns=list(COLUMNS), data=found)
            self._log(step, {"rollouts": table})

    def event(self, event: grpo.events.Event) -> None:
        if self._artifacts and isinstance(event, grpo.events.Saved):
            log_checkpoint(importlib.import_module(self._library), self._writer, self._run.name, event)

    def close(self) -> None:
        if self._made is not None:
            self._made.finish()
            self._made = None


def log_checkpoint(library: Any, run: Any, name: str, event: grpo.events.Saved) -> None:
    """Log a checkpoint's directory as a version of an artifact of the type ``model``.

    Args:
        library: the module ``wandb`` or ``trackio``.
        run: the library's run.
        name: name of the run; the artifact's name keeps its letters, digits and ``._-``.
        event: the event of the checkpoint.

    A checkpoint that the run has deleted meanwhile is skipped.
    """
    directory = Path(event.directory)
    artifact = library.Artifact(
        re.sub(r"[^A-Za-z0-9._-]", "-", name), type="model", metadata={"step": event.step}
    )
    try:
        files = [path for path in directory.rglob("*") if path.is_file()]
        artifact.add_dir(event.directory)
        if not files or not all(path.exists() for path in files):
            raise FileNotFoundError(event.directory)
        run.log_artifact(artifact, aliases=[f"step-{event.step}"])
    except (FileNotFoundError, ValueError):  # W&B raises ValueError for a missing directory
        if directory.is_dir() and all(path.exists() for path in files):
            raise
        log.warning(
            "the checkpoint of step %d was deleted before it could be logged as an artifact", event.step
        )
