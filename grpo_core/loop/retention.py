"""Decides which checkpoints to keep in addition to the newest: every Nth, and the best in validation."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from attrs import frozen

from grpo_core.contracts.errors import CheckpointError, ConfigError, did_you_mean
from grpo_core.contracts.protocols import Tracker
from grpo_core.contracts.typed import checked
from grpo_core.loop.metrics import lacks_scores
from grpo_core.storage.disk import Disk, replace_file

SCORES = "scores.json"
"""File next to the checkpoints: the metric, and its value for each validated step."""


@frozen
class SavedScores:
    """The contents of ``scores.json``."""

    metric: str
    scores: Mapping[str, float | None]


class Retention(Tracker):
    """Records validation scores, and names the checkpoints to keep.

    Values are on disk before a checkpoint is complete, so that the best one stays the best after a kill.

    Args:
        directory: directory of the checkpoints.
        due: whether the metric is measured for a version.
        every: checkpoints at multiples of this many steps stay; 0 is none.
        best: name of a metric of validations, as in "validation/TASK/accuracy"; the checkpoint with its
            largest value stays, or with "-" before the name, its smallest.  Empty is none.
        keep_best: number of the best checkpoints that stay.
        step: step that the run resumes from; values of later steps are dropped.
        disk: holds the values.
    """

    required = True

    def __init__(
        self,
        directory: Path,
        *,
        every: int = 0,
        best: str = "",
        keep_best: int = 1,
        due: Callable[[int], bool] = lambda version: True,
        step: int = 0,
        disk: Disk | None = None,
    ) -> None:
        self._path, self._every, self._due = directory / SCORES, every, due
        self._keep_best = keep_best
        self._sign, self._metric = (-1.0, best[1:]) if best.startswith("-") else (1.0, best)
        self._disk = disk or Disk()
        self.scores: dict[int, float | None] = {at: value for at, value in self._read().items() if at <= step}
        """Value of the metric by step; None if the validation lacked too many scores to have one."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        part = self._metric.rpartition("/")[0] + "/"  # of other sets, which are measured at other steps
        if not self._metric or not any(name.startswith(part) for name in values):
            return
        if self._metric not in values and not lacks_scores(self._metric, values):
            known = ", ".join(sorted(name for name in values if name.startswith("validation/")))
            raise ConfigError(
                f"checkpoint.best is {self._metric!r}, which validation does not measure."
                f"{did_you_mean(self._metric, set(values))} It measures {known}"
            )
        scores = {**self.scores, step: values.get(self._metric)}
        data = {"metric": self._metric, "scores": {str(at): value for at, value in scores.items()}}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self._disk, self._path, json.dumps(data).encode())
        self.scores = scores  # not before: a thread that tidies would remove the best one that is on disk

    def spared(self, steps: Collection[int]) -> set[int]:
        """Return the steps whose checkpoints stay even if they are old.

        A checkpoint newer than the last validation stays if it will be validated: it may be the best.
        """
        stay = {step for step in steps if self._every and step % self._every == 0}
        if self._metric:
            scores = self.scores
            stay |= {step for step in steps if step > max(scores, default=-1) and self._due(step)}
            stay |= set(self.best(steps)[: self._keep_best])
        return stay

    def best(self, steps: Collection[int]) -> list[int]:
        """Return the checkpoints at ``steps`` that have a value, the best first, the newest of equal ones."""
        known = {step: value for step in steps if (value := self.scores.get(step)) is not None}
        return sorted(known, key=lambda step: (self._sign * known[step], step), reverse=True)

    def _read(self) -> dict[int, float | None]:
        """Return the values on disk; values of another metric are ignored."""
        if not self._path.exists():
            return {}
        try:
            found = checked(json.loads(self._path.read_text(encoding="utf-8")), SavedScores)
            scores = {int(step): value for step, value in found.scores.items()}
            return scores if found.metric == self._metric else {}
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(
                f"{self._path}: cannot be read: {error}; remove it to forget which checkpoint was the best"
            ) from error
