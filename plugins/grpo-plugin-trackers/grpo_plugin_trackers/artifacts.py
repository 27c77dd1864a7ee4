"""Checkpoints as artifacts, through the common interface of Weights & Biases and Trackio."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import grpo_core as grpo

log = logging.getLogger("grpo_core")


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
