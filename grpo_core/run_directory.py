"""The directory of a run, and what it holds.

runs/NAME/
    config.toml                    the resolved configuration
    metrics.jsonl                  one line for each step and each validation
    rollouts/step-000120.jsonl     what that step was trained on
    events.jsonl                   everything that happened, append-only
    report.html                    all of it on one page, made when the run ends
    logs/                          what the child processes print
    checkpoints/                   see grpo_core.loop.checkpoint
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpo_core.config import Config, as_table, as_toml, build, read_toml
from grpo_core.errors import ConfigError
from grpo_core.records import RunInfo

CONFIG = "config.toml"


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
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(keepends=True), 1):
            try:
                yield json.loads(line)
            except ValueError:
                if line.endswith("\n"):
                    raise ConfigError(
                        f"{path}, line {number}: is no event; somebody has changed this file"
                    ) from None

    def forget_after(self, step: int) -> None:
        """Remove the records after the step from which a run continues; events are kept."""
        metrics = self.path / "metrics.jsonl"
        if metrics.exists():
            lines = metrics.read_text(encoding="utf-8").splitlines(keepends=True)
            kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= step]
            metrics.write_text("".join(kept), encoding="utf-8")
        for rollouts in (self.path / "rollouts").glob("step-*.jsonl"):
            if int(rollouts.stem.removeprefix("step-")) > step:
                rollouts.unlink()
