"""The directory of a run, and what it holds.

runs/NAME/
    config.toml                    the resolved configuration
    metrics.jsonl                  one line for each step and each validation
    rollouts/step-000120.jsonl.gz  what that step was trained on
    rollouts/validation-000120.jsonl.gz   what that version was validated by
    events.jsonl                   everything that happened, append-only; see grpo_core.chain
    report.html                    all of it on one page, made when the run ends
    logs/                          what the child processes print
    checkpoints/                   see grpo_core.loop.checkpoint
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_core import chain
from grpo_core.config import Config, as_table, as_toml, build, read_toml
from grpo_core.errors import ConfigError
from grpo_core.records import RunInfo

CONFIG = "config.toml"
PARTIAL = ".partial"
"""Suffix of a file of rollouts while it is written."""


class RunDirectory:
    """A directory that holds one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"
        self.model = path / "model"
        """Directory in which a tiny model is made."""

    @classmethod
    def create(cls, path: Path, config: Config) -> RunDirectory:
        """A new one.  Raises ConfigError if the path holds anything already."""
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            what = "holds another run" if (path / CONFIG).exists() else "is not empty"
            raise ConfigError(
                f"--output {path}: {what}; give another directory, or continue that run with --resume {path}"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / CONFIG).write_text(as_toml(config), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"--output {path}: cannot be written: {error.strerror}") from error
        run = cls(path)
        run.logs.mkdir(exist_ok=True)
        return run

    @classmethod
    def open(cls, path: Path) -> tuple[RunDirectory, Config]:
        """Open an existing run.  Raises ConfigError if the path is not a run's directory."""
        if not (path / CONFIG).is_file():
            raise ConfigError(f"{path}: holds no run (there is no {CONFIG} in it)")
        return cls(path), build([read_toml(path / CONFIG)])

    @classmethod
    def latest(cls, parent: Path) -> Path:
        """Open the newest run in ``parent`` with a checkpoint.  Raises ConfigError without such a run."""
        runs = {path.parent.parent for path in parent.glob("*/checkpoints/step-*")}
        if not runs:
            raise ConfigError(
                f"--resume: there is no run with a checkpoint in {parent}/; give the run's directory"
            )
        return max(runs, key=lambda run: max(p.stat().st_mtime for p in run.iterdir()))

    def info(self, config: Config, resumed_from: int | None) -> RunInfo:
        """Return the run's description for trackers."""
        return RunInfo(
            name=self.path.resolve().name,
            directory=self.path,
            config=as_table(config),
            resumed_from=resumed_from,
        )

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events of ``events.jsonl``.

        Raises ConfigError if it does not exist or a line is not an event.

        Only the last line may be half a line: what a process was writing when it was killed.  The next
        process cuts it off.
        """
        path = self.path / "events.jsonl"
        if not path.is_file():
            raise ConfigError(f"{self.path}: has no {path.name} yet")
        for line in chain.read(path):
            if not isinstance(line.value, dict):
                raise ConfigError(f"{path}, line {line.number}: is no event; somebody has changed this file")
            yield line.value

    def forget_after(self, step: int) -> None:
        """Remove the records after the step from which a run continues; events are kept."""
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            metrics.write_text("".join(kept), encoding="utf-8")
        for rollouts in (self.path / "rollouts").glob("*"):
            kind, at = rollouts_name(rollouts.name)
            if kind and rollouts.is_file() and (at > step or rollouts.name.endswith(PARTIAL)):
                rollouts.unlink()


def rollouts_name(name: str) -> tuple[str, int]:
    """Return the kind, "step" or "validation", and the step of a file of rollouts; "" for any other name."""
    found = re.fullmatch(rf"(step|validation)-(\d{{1,12}})\.jsonl(?:\.gz)?(?:{re.escape(PARTIAL)})?", name)
    return (found[1], int(found[2])) if found else ("", 0)
