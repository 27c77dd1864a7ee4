"""Finds the model of the teacher: a directory, a hub id, or the newest checkpoint of a run."""

from __future__ import annotations

from pathlib import Path

from grpo_core.errors import ConfigError
from grpo_core.loop import checkpoint
from grpo_core.run_directory import CONFIG, RunDirectory


def teacher_model(path: str) -> str:
    """Return the directory or hub id of a teacher; of a run it is the model of its newest checkpoint.

    Raises ConfigError for a run without a checkpoint.
    """
    directory = Path(path).expanduser()
    if not (directory / CONFIG).is_file():
        return path
    found = checkpoint.newest(RunDirectory(directory).checkpoints)
    if found is None:
        raise ConfigError(f"teacher.path is {path!r}, a run that has no checkpoint yet: train it first")
    return str(found.directory / "trainer")
