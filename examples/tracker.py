"""A tracker in a file: writes metrics of each step to a CSV file.

grpo-core train --env math:sort \
    --set 'tracking.trackers=["files", "terminal", "*", "./examples/tracker.py:Csv"]'
"""

import csv
from collections.abc import Mapping, Sequence

import grpo_core as grpo


class Csv(grpo.Tracker):
    """Writes one row for each step.

    Args:
        columns: names of metrics.
    """

    def __init__(self, run: grpo.RunInfo, columns: Sequence[str] = ("loss", "time/step")) -> None:
        self._file = open(run.directory / "metrics.csv", "a", newline="")  # noqa: SIM115 - closed in close
        self._columns = list(columns)
        self._rows = csv.writer(self._file)
        if run.resumed_from is None:
            self._rows.writerow(["step", *self._columns])

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        if "loss" in values:  # a step, not a validation
            self._rows.writerow([step, *(values.get(name, "") for name in self._columns)])

    def close(self) -> None:
        self._file.close()


@grpo.hookimpl
def grpo_trackers() -> dict[str, type]:
    return {"csv": Csv}
