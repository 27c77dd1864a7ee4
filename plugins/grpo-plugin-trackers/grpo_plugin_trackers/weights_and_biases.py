"""The tracker ``wandb``: Weights & Biases, online or offline."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import grpo_core as grpo
from grpo_plugin_trackers.artifacts import Service

ID = "wandb-id"
"""File in the run's directory with W&B's id, for resuming."""


class WeightsAndBiases(Service):
    """Logs to Weights & Biases, with the key of ``wandb login`` or ``WANDB_API_KEY``.

    Args:
        project: name of the project.
        entity: user or team; default: the key's.
        mode: "offline" writes files to the run's directory, which ``wandb sync`` uploads.
        completions: number of rollouts in each logged table.
        every: number of steps between two tables.
        group, tags: W&B's group and tags.
        artifacts: whether to log each checkpoint as a version of an artifact with the run's name.

    Raises ConfigError without a key in online mode, where W&B would prompt for it.
    """

    def __init__(
        self,
        run: grpo.RunInfo,
        project: str = "grpo-core",
        entity: str = "",
        mode: Literal["online", "offline"] = "online",
        completions: int = 8,
        every: int = 20,
        group: str = "",
        tags: Sequence[str] = (),
        artifacts: bool = False,
    ) -> None:
        if mode == "online" and not _has_key():
            raise grpo.ConfigError(
                "tracker wandb: there is no key; set WANDB_API_KEY, run `wandb login`, or set "
                'tracking.wandb.mode = "offline"'
            )
        super().__init__(run, "wandb", completions, every, artifacts)
        self._options: dict[str, Any] = {
            "project": project,
            "entity": entity or None,
            "mode": mode,
            "group": group or None,
            "tags": list(tags),
        }

    def _begun(self, library: Any) -> Any:
        begun = library.init(
            **self._options,
            name=self._run.name,
            id=_id(self._run.directory / ID),
            resume="allow",
            dir=str(self._run.directory),
            config=dict(self._run.config),
            # do not upload the run's output and log
            settings=library.Settings(console="off", silent=True),
        )
        # W&B's step must increase, but validations belong to earlier versions
        begun.define_metric("step")
        begun.define_metric("*", step_metric="step")
        return begun

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._writer.log({"step": step, **values})

    def event(self, event: grpo.events.Event) -> None:
        super().event(event)
        if isinstance(event, grpo.events.RunEnded) and (self._run.directory / ID).exists():
            # includes runs of killed processes
            self._writer.finish(exit_code=1 if event.reason == "failed" else 0)
            self._made = None


def _has_key() -> bool:
    """Whether W&B has a key, in the environment or from ``wandb login``."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host or "") is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _id(file: Path) -> str:
    """Return the id in a file, or write a new one."""
    import secrets

    if file.exists():
        return file.read_text(encoding="utf-8").strip()
    made = secrets.token_hex(8)
    file.write_text(made + "\n", encoding="utf-8")
    return made
