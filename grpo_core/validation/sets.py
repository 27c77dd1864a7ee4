"""The validation of a run: its tasks and its named sets, each with its own strategy and interval."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import evolve, field, frozen

from grpo_core.aio import gather
from grpo_core.config import ValidationConfig
from grpo_core.events import Event, ValidationPlayed
from grpo_core.protocols import EnvironmentClient, ValidationStrategy
from grpo_core.records import Prompt
from grpo_core.validation.runner import Context, Results, played_groups, run_strategy
from grpo_core.versions import Interval


@frozen(kw_only=True, eq=False)
class HeldOut:
    """Held-out prompts that one strategy measures: those of all tasks, or of one set."""

    config: ValidationConfig
    """The section as it is for them."""
    prompts: Mapping[str, Sequence[Prompt]]
    """By the name under which they are measured: a task's or the set's."""
    environments: Mapping[str, EnvironmentClient]
    """By the same names."""


@frozen(kw_only=True, eq=False)
class Measured:
    """Held-out prompts with their strategy, and when it measures them."""

    name: str
    """Name of the strategy."""
    strategy: ValidationStrategy
    interval: Interval
    context: Context
    """The strategy gets a copy of it for each version."""


@frozen(kw_only=True, eq=False)
class Validation:
    """Measures a version by everything that is due, at the same time."""

    parts: Sequence[Measured]
    last: int
    """The last version of the run."""
    emit: Callable[[Event], None] = field(default=lambda event: None)
    """Receives the rollouts as an event, also if a strategy fails."""

    async def __call__(self, version: int) -> Results:
        return await self.measure(
            version, [part for part in self.parts if part.interval.due(version, last=self.last)]
        )

    async def measure(self, version: int, parts: Sequence[Measured]) -> Results:
        """Measure a version by some parts, due or not; return the results of all."""
        contexts = [evolve(part.context, version=version) for part in parts]
        try:
            found = await gather(
                run_strategy(part.name, part.strategy, context)
                for part, context in zip(parts, contexts, strict=True)
            )
        finally:
            groups = tuple(group for context in contexts for group in played_groups(context))
            self.emit(ValidationPlayed(step=version, version=version, groups=groups))
        return {name: metrics for results in found for name, metrics in results.items()}
