"""The section ``[audit]`` of the configuration."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen
from attrs.validators import ge, gt, lt


@frozen(kw_only=True)
class AuditConfig:
    """A second environment judges some of the rollouts that the run trains."""

    second_opinion: str = ""
    """Name of an environment that judges a small random part of the trained successes again, such as a
    stricter reward for the same prompts; there is a warning if it refuses too many of them."""
    options: dict[str, Any] = field(factory=dict)
    """Options of the second environment's factory."""
    success: float | None = None
    """Smallest reward of a success in the second environment, instead of the one that it declares."""
    tasks: list[str] = field(factory=list)
    """Names of the tasks whose rollouts it judges; without names, all of them."""
    rollouts: int = field(default=16, validator=ge(1))
    """Largest number of rollouts of a task that it judges in each step."""
    tolerance: float = field(default=0.02, validator=[gt(0), lt(1)])
    """Share of successes that the second environment may refuse; raise it if the two differ by design."""
    false_alarms: float = field(default=0.01, validator=[gt(0), lt(1)])
    """Largest probability of an alarm in a run in which at most the tolerated share is refused."""
    stop: bool = False
    """Whether an alarm stops the run, after its step and with a checkpoint."""
