"""The validation of a run: its tasks and named sets, each with a strategy and an interval, and its engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from attrs import define, evolve, field, frozen

from grpo_core.config import ValidationConfig
from grpo_core.contracts.events import Event, Validated, ValidationPlayed, WarningRaised
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.protocols import Engine, ValidationStrategy
from grpo_core.contracts.records import Group, Prompt, Rollout, Weights
from grpo_core.data.order import some
from grpo_core.data.samplers import load_plugin_state, plugin_state
from grpo_core.engines.wrapped import WrappedEngine
from grpo_core.loop import canary
from grpo_core.loop.agreement import Tolerance
from grpo_core.loop.metrics import left_out
from grpo_core.loop.versions import Interval
from grpo_core.processes.aio import gather
from grpo_core.validation.estimates import MANY
from grpo_core.validation.runner import Context, Results, played_groups, run_strategy

# ---------------------------------------------------------------------------------- a separate engine


class WeightsTrackingEngine(WrappedEngine):
    """An engine that remembers the last weights that it was sent.

    Args:
        engine: the engine.
        check: is called when the engine holds its first weights.
    """

    weights: Weights | None = None

    def __init__(self, engine: Engine, check: Callable[[Weights], object] = lambda weights: None) -> None:
        super().__init__(engine)
        self._check = check

    async def update_weights(self, weights: Weights) -> None:
        await super().update_weights(weights)
        if self.weights is None:
            self._check(weights)
        self.weights = weights


@define(kw_only=True, eq=False)
class DedicatedValidator:
    """Measures on an engine that training does not use.

    Training waits until that engine holds the weights, and continues while it generates.  Versions are
    measured one after another.

    Results are emitted as they arrive; the results of ``last`` are returned, since training has ended.
    ``watch`` measures: it has to run concurrently with the pipeline, and raises errors.
    """

    measure: Callable[[int], Awaitable[Results]]
    engine: Engine
    trained: WeightsTrackingEngine
    emit: Callable[[Event], None]
    last: int
    pauses: bool = False
    """Training waits for the results as well."""
    deadline: float
    """Seconds for the weight update, and again for the canary."""
    canary_tolerance: Tolerance
    _due: asyncio.Queue[int] = field(init=False, factory=asyncio.Queue)

    async def __call__(self, version: int) -> Results | None:
        await self._due.join()
        weights = self.trained.weights
        assert weights is not None
        assert weights.version == version
        key = "validation.engine.deadline"
        await canary.update(self.engine, weights, deadline=self.deadline, key=key)
        await canary.verify(self.engine, weights, tolerance=self.canary_tolerance, deadline=self.deadline)
        if self.pauses or version == self.last:
            return await self.measure(version)
        self._due.put_nowait(version)
        return None

    async def watch(self) -> None:
        while True:
            version = await self._due.get()
            results = await self.measure(version)
            self.emit(Validated(step=version, version=version, results=results))
            self._due.task_done()


# ---------------------------------------------------------------------------------- tasks and sets


def lacking(groups: Sequence[Group]) -> dict[str, str]:
    """Return a message, by cause, for each task with many unscored rollouts."""
    found: dict[str, list[Rollout]] = {}
    for group in groups:
        found.setdefault(group.prompt.environment, []).extend(group.rollouts)
    messages = {}
    for task, rollouts in found.items():
        unscored = [rollout for rollout in rollouts if rollout.reward is None]
        if len(unscored) > MANY * len(rollouts):
            messages[f"unscored/{task}"] = (
                f"validation of {task!r}: {len(unscored)} of {len(rollouts)} rollouts have no score; "
                f"metrics that they could change by more than {MANY:.0%} have bounds, or are left out. "
                f"The first error: {unscored[0].error or 'unscored'}"
            )
    return messages


@frozen(kw_only=True, eq=False)
class HeldOut:
    """Held-out prompts that one strategy measures: of all tasks, or of one set."""

    name: str = ""
    """Name of the set; empty for the tasks."""
    config: ValidationConfig
    """The section for these prompts."""
    prompts: Mapping[str, Sequence[Prompt]]
    """By the name of their task or set."""
    environments: Mapping[str, EnvironmentClient]
    """By the same names."""
    of: Mapping[str, int] = field(factory=dict)
    """Number of prompts of which ``prompts`` has some, by name; 0 if they are the first ones of a stream."""
    seed: int = 0

    def places(self, name: str) -> Sequence[int]:
        """Return the places of the prompts to measure: a choice by the seed, the same at each version."""
        return some(len(self.prompts[name]), self.config.prompts, f"{self.seed}/validation/{name}")

    def measured(self) -> dict[str, list[Prompt]]:
        """Return the prompts to measure, by name."""
        return {
            name: [own[place] for place in self.places(name)] for name, own in self.prompts.items() if own
        }

    def known(self) -> dict[str, int]:
        """Return the number of all prompts that could be measured, by name; 0 for a stream."""
        return {name: self.of.get(name, len(own)) for name, own in self.prompts.items()}


@frozen(kw_only=True, eq=False)
class Measured:
    """Held-out prompts with their strategy and its schedule."""

    set: str
    """Name of the set; empty for the tasks."""
    name: str
    """Name of the strategy."""
    strategy: ValidationStrategy
    interval: Interval
    context: Context
    """The strategy gets a copy of it for each version."""

    @property
    def who(self) -> str:
        of_set = f" of the set {self.set!r}" if self.set else ""
        return f"validation strategy {self.name!r}{of_set}"


@define(kw_only=True, eq=False)
class Validation:
    """Runs everything that is due for a version, concurrently."""

    parts: Sequence[Measured]
    last: int
    """The last version of the run."""
    emit: Callable[[Event], None] = field(default=lambda event: None)
    """Receives the rollouts as an event, also if a strategy fails, but not if the validation is cancelled."""
    measured: int = -1
    """The newest version for which everything due was measured."""

    async def __call__(self, version: int) -> Results:
        due = [part for part in self.parts if part.interval.due(version, last=self.last)]
        results = await self.measure(version, due)
        self.measured = version
        return results

    async def measure(self, version: int, parts: Sequence[Measured]) -> Results:
        """Measure a version by some parts, due or not; return the results of all."""
        contexts = [evolve(part.context, version=version) for part in parts]
        try:
            found = await gather(
                run_strategy(part.name, part.strategy, context)
                for part, context in zip(parts, contexts, strict=True)
            )
        except Exception:
            self._emit_played(version, contexts)
            raise
        self._emit_played(version, contexts)
        return {name: metrics for results in found for name, metrics in results.items()}

    def _emit_played(self, version: int, contexts: Sequence[Context]) -> None:
        groups = tuple(group for context in contexts for group in played_groups(context))
        self.emit(ValidationPlayed(step=version, version=version, groups=groups))
        for cause, message in (left_out(groups) | lacking(groups)).items():
            self.emit(WarningRaised(step=version, cause=cause, message=message))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the strategies, by set.  Raises PluginError if one is not JSON."""
        states = {part: plugin_state(part.strategy, part.who) for part in self.parts}
        return {
            part.set: {"strategy": part.name, "state": state}
            for part, state in states.items()
            if state is not None
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from a checkpoint; return messages about strategies that are new since then.

        Raises CheckpointError if a strategy does not know its state.
        """
        notes = []
        for part in self.parts:
            saved = state.get(part.set)
            if saved is not None and saved["strategy"] == part.name:
                load_plugin_state(part.strategy, part.who, saved["state"])
            elif saved is not None:
                notes.append(f"{part.who} is new since the checkpoint, which is of {saved['strategy']!r}")
        return notes
