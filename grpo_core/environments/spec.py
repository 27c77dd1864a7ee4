"""The specification of an environment's worker, which is sent to where it runs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from grpo_core.config import EnvironmentConfig


@frozen(kw_only=True)
class EnvironmentSpec:
    """The specification of one worker of a task's environment."""

    task: str
    env: str
    """Name of the environment, as in ``math:sort``."""
    options: Mapping[str, Any] = field(factory=dict)
    config: EnvironmentConfig = field(factory=EnvironmentConfig)
    log: Path | None = None
    """File for the environment's output."""
