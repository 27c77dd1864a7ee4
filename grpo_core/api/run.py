"""A run as an object: the one reader of a run's files."""

from __future__ import annotations

import gzip
import json
import os
import re
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from grpo_core.config import read_toml
from grpo_core.contracts.errors import ConfigError
from grpo_core.storage.run_directory import (
    CONFIG,
    ROLLOUTS,
    VALIDATION,
    RunDirectory,
    metrics_rows,
    validations,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpo_core.contracts.records import Group

EVENTS, METRICS, TIMELINE = "events.jsonl", "metrics.jsonl", "timeline.jsonl"
EVENT = '"event": "'
"""Text near the beginning of every event."""
TAIL = 65536
"""Number of bytes at the end of the events that are searched for a run's end."""


class Run:
    """A run's directory: its configuration, and its records so far.

    Everything is read on access, so a running run shows its current state.

    Args:
        path: directory of the run.
        strict: raise ConfigError for a line that cannot be read; otherwise it is left out and listed in
            ``damaged``.

    Raises ConfigError if the path holds no run.
    """

    def __init__(self, path: str | os.PathLike[str], *, strict: bool = True) -> None:
        self.path = RunDirectory.existing(Path(path)).path
        """Directory of the run."""
        self.damaged: dict[str, set[int]] = {}
        """Numbers of the lines that could not be read, by file; 0 is the file itself."""
        self._strict = strict

    # ------------------------------------------------------------------------------ configuration and state

    @property
    def config(self) -> dict[str, Any]:
        """The resolved configuration, as tables."""
        return self._table(CONFIG)

    @property
    def configs(self) -> list[dict[str, Any]]:
        """The configurations that resumes have replaced, oldest first, and the current one."""
        numbered = {
            int(found[1]): path.name
            for path in self.path.glob("config-*.toml")
            if (found := re.fullmatch(r"config-(\d+)\.toml", path.name))
        }
        earlier = [self._table(name) for _, name in sorted(numbered.items())]
        return [table for table in (*earlier, self.config) if table]

    @property
    def is_running(self) -> bool:
        """Whether a process of this machine runs here."""
        return RunDirectory(self.path).is_running

    @property
    def state(self) -> str:
        """Why it ended, as "finished" or "failed"; "running", or "killed" if no reason was recorded.

        A directory that ``grpo-core validate`` has written is "measured".
        """
        if (self.path / "results.json").is_file():
            return "measured"
        try:
            with (self.path / EVENTS).open("rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            lines = []
        for line in reversed(lines):
            if any(f'{EVENT}{name}"' in line[:120] for name in ("Opened", "RunStarted", "RunEnded")):
                row = _object(line) or {}
                if row.get("event") == "RunEnded":
                    return str(row.get("reason"))
                break
        return "running" if self.is_running else "killed"

    @property
    def started(self) -> datetime | None:
        """The time of its first start."""
        try:
            return datetime.fromtimestamp(float(next(self.rows(EVENTS))["time"]))
        except (StopIteration, ConfigError, ValueError, KeyError, TypeError, OverflowError, OSError):
            return None

    # ------------------------------------------------------------------------------ records

    def rows(self, file: str, *events: str) -> Iterator[dict[str, Any]]:
        """Yield the JSON objects of a file of lines, such as "provenance.jsonl"; nothing if it is not there.

        The last line may be incomplete, if a process was killed while writing it.

        Args:
            file: name of the file below the run's directory.
            events: names of the events to return; the others are not parsed.  Default: all lines.
        """
        path, number = self.path / file, 0
        opened: Any = gzip.open if path.suffix == ".gz" else open
        marks = [f'{EVENT}{event}"' for event in events]
        try:
            with opened(path, "rt", encoding="utf-8", errors="replace") as lines:
                for number, line in enumerate(lines, 1):
                    begin = line[:120]
                    unwanted = bool(marks) and not any(mark in begin for mark in marks)
                    if unwanted and begin.startswith("{") and EVENT in begin and line.endswith("}\n"):
                        continue
                    row = _object(line)
                    if row is None:
                        self._note(file, number, half=not line.endswith("\n"))
                    elif not unwanted:
                        yield row
        except FileNotFoundError:
            return
        except (OSError, EOFError, zlib.error):
            self._note(file, 0)

    def events(self, *names: str) -> Iterator[dict[str, Any]]:
        """Yield the events of the run in order: all, or those with these names (``grpo_core.events``)."""
        return self.rows(EVENTS, *names)

    def timeline(self) -> Iterator[dict[str, Any]]:
        """Yield the spans of the timeline: lane, what was done, begin, end and busy seconds of each."""
        return self.rows(TIMELINE)

    def metrics(self) -> list[dict[str, Any]]:
        """Return a row for each step and each validation, with its step and the metrics of docs/metrics.md.

        ``pandas.DataFrame(run.metrics())`` makes a table of them.
        """
        found = metrics_rows(self.path / METRICS) if self._strict else self.rows(METRICS)
        return [{sys.intern(name): value for name, value in row.items()} for row in found]

    def validations(self, rows: Iterable[Mapping[str, Any]] | None = None) -> list[dict[str, Any]]:
        """Return a row for each validation of a task or set: its step, its task and its metrics.

        Args:
            rows: the metrics, if they have been read already.
        """
        return validations(self.metrics() if rows is None else rows)

    def steps(self, *, validation: bool = False) -> list[int]:
        """Return the steps whose rollouts are stored, or the versions whose validation is stored."""
        return list(self.texts(validation=validation))

    def texts(self, *, validation: bool = False) -> dict[int, str]:
        """Return the files of the texts of rollouts, which ``rows`` reads, by step or version."""
        from grpo_core.reporting.stored import files_of_texts

        folder = VALIDATION if validation else ROLLOUTS
        return {step: f"{folder}/{path.name}" for step, path in files_of_texts(self.path / folder).items()}

    def rollouts(self, step: int, *, validation: bool = False) -> list[Group]:
        """Return the groups that trained or validated a version; see ``stored_rollouts``."""
        from grpo_core.reporting.stored import stored_rollouts

        return stored_rollouts(self.path, step, validation=validation)

    @property
    def checkpoints(self) -> dict[int, Path]:
        """The directories of the complete checkpoints, by step."""
        from grpo_core.loop.checkpoint import complete_names

        return dict(complete_names(self.path / "checkpoints"))

    def model(self, step: int | None = None) -> PreTrainedModel:
        """Load the weights of a checkpoint, as the engine of training held them, with transformers.

        Adapters are loaded with peft, onto the model that they belong to.

        Args:
            step: step of the checkpoint; None is the newest one that is intact.

        Raises ConfigError if there is none, CheckpointError if it is damaged.
        """
        from transformers import AutoModelForCausalLM

        from grpo_core.loop.checkpoint import choose_checkpoint
        from grpo_core.models.files import ADAPTERS
        from grpo_core.weights.names import read_held

        saved = choose_checkpoint(self.path, step).directory / "trainer"
        if not (saved / ADAPTERS).is_file():
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(saved, dtype="auto")
            read_held(model, saved)
            return model
        from peft import PeftModel

        from grpo_core.app.model_sources import started_from
        from grpo_core.training.building import write_part

        run, config = RunDirectory.open(self.path)
        base = AutoModelForCausalLM.from_pretrained(started_from(run, config))
        with TemporaryDirectory() as part:
            write_part(saved, config, Path(part))
            adapted: PreTrainedModel = PeftModel.from_pretrained(base, part)
        return adapted

    def tokenizer(self, step: int | None = None) -> PreTrainedTokenizerBase:
        """Load the tokenizer of a checkpoint; see ``model``."""
        from transformers import AutoTokenizer

        from grpo_core.loop.checkpoint import choose_checkpoint

        saved = choose_checkpoint(self.path, step).directory / "trainer"
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(saved)
        return tokenizer

    def verify(self) -> list[str]:
        """Return the problems in the run's files; none if no prompt was lost or doubled."""
        from grpo_core.reporting.verification import verified

        return list(verified(self.path).findings)

    def _table(self, file: str) -> dict[str, Any]:
        try:
            return read_toml(self.path / file)
        except ConfigError:
            if self._strict:
                raise
            self._note(file, 0)
            return {}

    def _note(self, file: str, line: int, *, half: bool = False) -> None:
        """Record a line that cannot be read; if ``strict``, raise ConfigError unless it is incomplete."""
        if not self._strict:
            self.damaged.setdefault(file, set()).add(line)
        elif not half:
            where = f", line {line}" if line else ""
            raise ConfigError(f"{self.path / file}{where}: cannot be read; somebody has changed this file")

    def __fspath__(self) -> str:
        return str(self.path)

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        """Return a table of the first and the last validation, for Jupyter."""
        from grpo_core.loop.metrics import headline
        from grpo_core.validation.results import score

        by_task: dict[str, list[dict[str, Any]]] = {}
        for row in self.validations():
            by_task.setdefault(row["task"], []).append(row)
        lines = ""
        for task, rows in by_task.items():
            last = rows[-1]
            metric = (
                headline({key: value for key, value in last.items() if key not in ("step", "task")}) or ""
            )
            cells = [task, metric, *(score(metric, row) for row in (rows[0], last))]
            lines += "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"
        head = "<tr><th>task</th><th>metric</th><th>first</th><th>last</th></tr>"
        table = f"<table>{head}{lines}</table>" if lines else ""
        return f"<p>Run <code>{escape(str(self.path))}</code></p>{table}"


def _object(line: str) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None if it is something else."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None
