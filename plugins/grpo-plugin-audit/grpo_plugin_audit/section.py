"""The section ``[audit]`` of the configuration."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen
from attrs.validators import ge, gt, lt

from grpo_core.kit import options_of


@frozen(kw_only=True)
class AuditConfig:
    """A second opinion about rollouts that the run trains: another environment judges some of them."""

    second_opinion: str = ""
    """Name of the environment that judges a small random part of the trained successes once more, such as a
    stricter reward for the same prompts; a warning says when it refuses too many of them."""
    options: dict[str, Any] = field(factory=dict, metadata=options_of("environment", "second_opinion"))
    """Options are passed to the factory of the second environment."""
    success: float | None = None
    """Reward from which the second environment calls a rollout a success, instead of what it declares."""
    tasks: list[str] = field(factory=list)
    """Names of the tasks whose rollouts it judges; without names, all of them."""
    rollouts: int = field(default=16, validator=ge(1))
    """Largest number of a task's rollouts that it judges of each step."""
    tolerance: float = field(default=0.02, validator=[gt(0), lt(1)])
    """Share of the successes that the second environment may refuse: raise it if the two differ by design."""
    false_alarms: float = field(default=0.01, validator=[gt(0), lt(1)])
    """Largest chance that a run has an alarm although no more than the tolerated share is refused."""
    stop: bool = False
    """The run stops at the alarm, after its step and with a checkpoint."""
