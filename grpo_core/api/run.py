"""A run as an object: it reads what the run has written."""

from __future__ import annotations

import os
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_core.config import read_toml
from grpo_core.run_directory import CONFIG, ROLLOUTS, VALIDATION, RunDirectory, metrics_rows, rollouts_step

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_core.records import Group

METRICS = "metrics.jsonl"


class Run:
    """A run's directory: what it was configured with, and what it has written so far.

    Everything is read when it is asked for, so a run that is going on shows its present state.

    Args:
        path: directory of the run.

    Raises ConfigError if the path holds no run.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = RunDirectory.existing(Path(path)).path
        """Directory of the run."""

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, as tables."""
        return read_toml(self.path / CONFIG)

    def metrics(self) -> list[dict[str, Any]]:
        """Return a row for each step and each validation, with its step and the metrics of docs/metrics.md.

        ``pandas.DataFrame(run.metrics())`` makes a table of them.
        """
        return list(metrics_rows(self.path / METRICS))

    def validations(self) -> list[dict[str, Any]]:
        """Return a row for each validation of a task or set: its step, its task and its metrics."""
        rows: dict[tuple[int, str], dict[str, Any]] = {}
        for row in self.metrics():
            for key, value in row.items():
                first, _, rest = key.partition("/")
                task, _, metric = rest.partition("/")
                if first == "validation" and metric:
                    at = row["step"], task
                    rows.setdefault(at, {"step": at[0], "task": task})[metric] = value
        return list(rows.values())

    def steps(self, *, validation: bool = False) -> list[int]:
        """Return the steps whose rollouts are stored, or the versions whose validation is."""
        folder = self.path / (VALIDATION if validation else ROLLOUTS)
        found = {rollouts_step(file.name) for file in folder.glob("step-*.jsonl*")}
        return sorted(step for step in found if step is not None)

    def rollouts(self, step: int, *, validation: bool = False) -> list[Group]:
        """Return the groups that trained a version, or that measured it; see ``stored_rollouts``."""
        from grpo_core.reporting.stored import stored_rollouts

        return stored_rollouts(self.path, step, validation=validation)

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The directories of the complete checkpoints, by step."""
        from grpo_core.loop.checkpoint import complete_names

        return dict(complete_names(self.path / "checkpoints"))

    def model(self, step: int | None = None) -> PreTrainedModel:
        """Load the weights of a checkpoint with transformers, and with peft if they are adapters.

        Args:
            step: step of the checkpoint; None is the newest one that is intact.

        Raises ConfigError if there is none, CheckpointError if it is damaged.
        """
        from transformers import AutoModelForCausalLM

        from grpo_core.commands import export
        from grpo_core.validation.target import started_from

        found = export.find(self.path, step, None)
        if found.form is None:
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(found.saved)
            return model
        from peft import PeftModel

        base = AutoModelForCausalLM.from_pretrained(started_from(found.run, found.config))
        adapted: PreTrainedModel = PeftModel.from_pretrained(base, found.saved)
        return adapted

    def tokenizer(self, step: int | None = None) -> PreTrainedTokenizerBase:
        """Load the tokenizer of a checkpoint; see ``model``."""
        from transformers import AutoTokenizer

        from grpo_core.commands import export

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            export.find(self.path, step, None).saved
        )
        return tokenizer

    def verify(self) -> list[str]:
        """Return what the files of the run show to be wrong: nothing, if no prompt was lost or doubled."""
        from grpo_core.reporting.verification import verified

        return list(verified(self.path).findings)

    def report(self) -> Path:
        """Write report.html; return its path."""
        from grpo_core.reporting.report import write

        return write(self.path)

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """Return a table of the first and the last validation, for Jupyter."""
        by_task: dict[str, list[dict[str, Any]]] = {}
        for row in self.validations():
            by_task.setdefault(row["task"], []).append(row)
        rows = [_html_row(task, rows[0], rows[-1]) for task, rows in by_task.items()]
        head = "<tr><th>task</th><th>metric</th><th>first</th><th>last</th></tr>"
        table = f"<table>{head}{''.join(rows)}</table>" if rows else ""
        return f"<p>Run <code>{escape(str(self.path))}</code></p>{table}"


def _html_row(task: str, first: dict[str, Any], last: dict[str, Any]) -> str:
    from grpo_core.loop.metrics import headline
    from grpo_core.validation.results import score

    metric = headline({key: value for key, value in last.items() if key not in ("step", "task")}) or ""
    cells = [task, metric, *(score(metric, row) for row in (first, last))]
    return "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
