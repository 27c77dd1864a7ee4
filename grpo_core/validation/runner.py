"""Validation: held-out prompts, rolled out by one version of the weights, measured by a strategy.

The strategies go through the same ``play`` and the same environment batching as training.  A run validates
its tasks and named sets, each with a strategy and an interval, on its engine or a separate one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal

from attrs import define, evolve, field, frozen

from grpo_core.config import ValidationConfig
from grpo_core.contracts.errors import DeadlineExceeded, PluginError, WeightSyncError, plugin_errors
from grpo_core.contracts.events import Event, Validated, ValidationPlayed, WarningRaised
from grpo_core.contracts.incidents import report
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.protocols import Engine, Renderer, ValidationStrategy
from grpo_core.contracts.records import Group, Prompt, Rollout, Weights
from grpo_core.data.order import some
from grpo_core.data.samplers import load_plugin_state, plugin_state
from grpo_core.engines.wrapped import WrappedEngine
from grpo_core.environments.feedback import NO_REWARD, as_number
from grpo_core.loop import canary
from grpo_core.loop.agreement import Tolerance
from grpo_core.loop.metrics import OF, left_out
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, cause, derive_seed, play
from grpo_core.loop.rows import sampled_versions
from grpo_core.loop.versions import Interval
from grpo_core.processes.aio import UNLIMITED, FairSemaphore, Limit, gather, raising_root_cause
from grpo_core.text.messages import readable
from grpo_core.validation.estimates import MANY

Results = Mapping[str, Mapping[str, float]]
"""``{task: {metric: value}}``."""


FEEDBACK_RETRIES = 2
"""Largest number of times that a rollout is played again because its environment gave no reward."""


@define(kw_only=True, eq=False)
class Context:
    """The ``ValidationContext`` of a strategy: one version, held-out prompts and ``rollout``."""

    version: int
    prompts: Mapping[str, Sequence[Prompt]]
    engine: Engine
    environments: Mapping[str, EnvironmentClient]
    renderer: Renderer
    sampling: SamplingParams
    deadline: float | None = None
    """Deadline in seconds for one call of ``rollout``."""
    retries: int = 0
    """Number of times that a lost rollout is played again; a rollout without a reward for another reason is
    played again at most ``FEEDBACK_RETRIES`` times."""
    seed: int = 0
    group_size: int = 1
    """Smallest size of a group where the environment compares rollouts."""
    places: FairSemaphore = field(factory=lambda: FairSemaphore(UNLIMITED))
    """Limits the number of concurrent rollouts, including training's."""
    known: Mapping[str, int] = field(factory=dict)
    """Number of prompts of which ``prompts`` has some, by task; 0 if they are the first ones of a stream."""
    played: list[tuple[Prompt, Rollout]] = field(init=False, factory=list)
    """All rollouts so far, each with its prompt."""
    _asked: Counter[tuple[str, str]] = field(init=False, factory=Counter)
    """Number of rollouts of each prompt so far."""
    _limit: Limit | None = field(init=False, default=None)
    """Ends a strategy that neither plays rollouts nor returns."""

    async def rollout(
        self,
        prompts: Sequence[Prompt],
        *,
        n: int = 1,
        temperature: float = 0.0,
        max_tokens: int | None = None,
        mode: Literal["batched", "pipelined"] = "batched",
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
    ) -> list[Rollout]:
        """Play ``n`` rollouts of each prompt; return them grouped by prompt.

        ``pipelined``: each at its own pace (or each group, where the environment compares them); the
        environment's batching still merges calls that arrive together.  ``batched``: all in lockstep, with
        one environment call a turn for all that are live.

        ``top_p``, ``top_k`` and ``min_p`` truncate the distribution; None uses the values of ``sampling``.

        Where the environment compares the rollouts of a group, a prompt with fewer than ``group_size`` of
        them gets companions, which are sampled as in training.  They are compared, but not returned.

        Their seeds are a function of the run's seed, the prompt, and the number of its earlier rollouts: the
        same for every version that is measured.  Raises WeightSyncError if a token was sampled by another
        version, and PluginError for a prompt that no model could read.
        """
        measured = [self._requests(readable(prompt, "validation strategy"), n) for prompt in prompts]
        requests = [each for own in measured for each in (*own, *self._companions(own))]
        given: dict[str, Any] = {
            "max_tokens": max_tokens or None,
            "top_p": top_p,
            "top_k": top_k,
            "min_p": min_p,
        }
        sampling = evolve(
            self.sampling,
            temperature=temperature,
            truncated="train",  # validation measures them, too
            **{name: value for name, value in given.items() if value is not None},
        )
        batched = mode == "batched"
        self._extend()
        parts = self._apart(requests)
        if batched:  # parts are joined to larger ones, of as many rollouts as there are places
            joined: list[list[RolloutRequest]] = [[]]
            for part in parts:
                if joined[-1] and len(joined[-1]) + len(part) > self.places.number:
                    joined.append([])
                joined[-1] += part
            parts = joined
        played = await gather(self._play(part, sampling, lockstep=batched) for part in parts if part)
        rollouts = [rollout for part in played for rollout in part]
        found = {id(request): rollout for request, rollout in zip(requests, rollouts, strict=True)}
        versions = sampled_versions(rollouts)
        others = set(versions[versions != self.version].tolist())
        if others:
            raise WeightSyncError(
                f"validation of version {self.version}: the engine sampled tokens with version "
                f"{', '.join(map(str, sorted(others)))}; it must hold one version from start to end"
            )
        self._extend()
        own = [request for each in measured for request in each]
        self.played += [(request.prompt, found[id(request)]) for request in own]
        return [found[id(request)] for request in own]

    @property
    def patience(self) -> float | None:
        """Seconds from the beginning or end of a set of rollouts to the next, or to the strategy's end."""
        return None if self.deadline is None else 2 * self.deadline

    def _extend(self) -> None:
        if self._limit is not None:
            self._limit.restart(self.patience)

    def _requests(self, prompt: Prompt, n: int) -> list[RolloutRequest]:
        task, before = prompt.environment, self._asked[prompt.environment, prompt.id]
        self._asked[task, prompt.id] += n
        return [
            RolloutRequest(
                prompt=prompt,
                seed=derive_seed("validation", self.seed, task, prompt.id, i),
                group=f"validation/{task}/{prompt.id}/{before}",
            )
            for i in range(before, before + n)
        ]

    def _companions(self, own: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """Return the requests that complete a compared group, for the rollouts of one prompt."""
        if not own or not self.environments[own[0].prompt.environment].about.needs_group:
            return []
        return [
            evolve(
                own[0], seed=derive_seed("companion", own[0].seed, i), temperature=self.sampling.temperature
            )
            for i in range(self.group_size - len(own))
        ]

    def _apart(self, requests: Sequence[RolloutRequest]) -> list[list[RolloutRequest]]:
        """Return the parts that are played independently: rollouts, or groups that are compared."""
        parts: dict[object, list[RolloutRequest]] = {}
        for request in requests:
            task = request.prompt.environment
            key = (task, request.group) if self.environments[task].about.needs_group else id(request)
            parts.setdefault(key, []).append(request)
        return list(parts.values())

    async def _play(
        self, requests: Sequence[RolloutRequest], sampling: SamplingParams, *, lockstep: bool
    ) -> list[Rollout]:
        """Play rollouts as places are free; play unscored ones again, within the deadline."""
        played: dict[int, Rollout] = {}
        wanted = list(range(len(requests)))
        async with self.places.take(len(requests)):
            self._extend()
            limit = Limit(self.deadline)
            for attempt in range(self.retries + 1):
                if not wanted or (limit.left is not None and limit.left <= 0):
                    break
                if lost := [i for i in wanted if i in played and played[i].lost]:
                    first, task = played[lost[0]], requests[lost[0]].prompt.environment
                    message = (
                        f"{len(wanted)} of its rollouts are played again; the first, of task {task!r}: "
                        f"{first.error}"
                    )
                    report(cause(first), "validation", message)
                rollouts = await play(
                    [requests[i] for i in wanted],
                    engine=self.engine,
                    environments=self.environments,
                    renderer=self.renderer,
                    sampling=sampling,
                    deadline=limit,
                    lockstep=lockstep,
                )
                played.update(zip(wanted, rollouts, strict=True))
                wanted = self._again(requests, played, lost_only=attempt >= FEEDBACK_RETRIES)
            self._extend()
        return [played[i] for i in range(len(requests))]

    def _again(
        self, requests: Sequence[RolloutRequest], played: Mapping[int, Rollout], *, lost_only: bool
    ) -> list[int]:
        """Return the places of the rollouts to play again; a compared group is played again as a whole."""
        failed = {
            i for i, rollout in played.items() if rollout.lost or (rollout.reward is None and not lost_only)
        }
        groups = {(requests[i].prompt.environment, requests[i].group) for i in failed}
        return [
            i
            for i, request in enumerate(requests)
            if i in failed
            or (
                self.environments[request.prompt.environment].about.needs_group
                and (request.prompt.environment, request.group) in groups
            )
        ]


def played_groups(context: Context) -> tuple[Group, ...]:
    """Return the rollouts that a strategy has played, by prompt."""
    found: dict[tuple[str, str], list[tuple[Prompt, Rollout]]] = {}
    for prompt, rollout in context.played:
        found.setdefault((prompt.environment, prompt.id), []).append((prompt, rollout))
    return tuple(
        Group(
            prompt=played[0][0],
            rollouts=tuple(rollout for _, rollout in played),
            generation_version=context.version,
            target_version=context.version,
        )
        for played in found.values()
    )


async def run_strategy(
    name: str, strategy: ValidationStrategy, context: Context
) -> dict[str, dict[str, float]]:
    """Run a strategy and check what it returns; unscored rollouts of each task are counted for it.

    Raises PluginError that names the strategy, the task and the metric, or says that no rollout of a task
    received feedback: nothing is reported then, in particular no accuracy of 0.  Raises
    DeadlineExceeded if the strategy neither plays rollouts nor returns.
    """
    context._limit = limit = Limit(context.patience)
    try:
        async with limit:
            with plugin_errors(f"validation strategy {name!r}"), raising_root_cause():
                results = await strategy.validate(context)
    except TimeoutError:
        raise DeadlineExceeded(
            f"validation strategy {name!r}: validate() neither returned nor played rollouts for "
            f"{context.patience:g} s, twice validation.deadline; look for what it waits for"
        ) from None
    _check(name, results, context.prompts)
    results = {task: _with_number_of_prompts(context, task, part) for task, part in results.items()}
    played: dict[str, list[Rollout]] = {}
    for prompt, rollout in context.played:
        played.setdefault(prompt.environment, []).append(rollout)
    counts: dict[str, dict[str, float]] = {}
    for task, rollouts in played.items():
        unscored = [rollout for rollout in rollouts if rollout.reward is None]
        if len(unscored) == len(rollouts):
            fault = unscored[0].fault
            if fault and all(each.fault and each.fault.kind == NO_REWARD for each in unscored):
                raise PluginError(
                    f"task {task!r}: {fault.message} for every reply; is a `return` missing?"
                ).carrying(fault)
            raise PluginError(
                f"task {task!r}: none of the {len(rollouts)} rollouts of the validation strategy {name!r} "
                f"received feedback; the first one: {unscored[0].error or 'unscored'}"
            ).carrying(fault)
        share = {"unscored": len(unscored) / len(rollouts)} if unscored else {}
        counts[task] = {"errors": float(len(unscored)), **share}
    return {
        task: {metric: float(value) for metric, value in part.items()} | counts.get(task, {})
        for task, part in results.items()
    }


def _with_number_of_prompts(context: Context, task: str, metrics: Mapping[str, float]) -> Mapping[str, float]:
    """Add the number of prompts, and of how many (0: the first of a stream), if these are not all."""
    of, used = context.known.get(task, 0), len(context.prompts.get(task, ()))
    if task not in context.known or of == used:
        return metrics
    return {"prompts": used, **metrics, OF: of}


def _check(name: str, results: object, tasks: Mapping[str, object]) -> None:
    expected = "expected {task: {metric: number}}"
    who = f"validation strategy {name!r}: validate() returned"
    if not isinstance(results, Mapping) or not all(isinstance(part, Mapping) for part in results.values()):
        raise PluginError(f"{who} {type(results).__name__}, {expected}")
    if missing := sorted(set(tasks) - set(results)):
        raise PluginError(f"{who} nothing for task {', '.join(map(repr, missing))}; {expected} for each task")
    for task, part in results.items():
        for metric, value in part.items():
            if "/" in metric:
                raise PluginError(f"{who} the metric {metric!r} of task {task!r}; a name contains no slash")
            if as_number(value) is None:
                raise PluginError(
                    f"{who} {value!r} as {metric!r} of task {task!r}; expected a finite number (leave out "
                    "what cannot be measured)"
                )


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

    def selection(self) -> dict[str, list[Prompt]]:
        """Return the prompts to measure, by name."""
        return {
            name: [own[place] for place in self.places(name)] for name, own in self.prompts.items() if own
        }

    def context(self, shared: Context, version: int) -> Context:
        """Return the context in which a version is measured, of what all parts share."""
        config = self.config
        return evolve(
            shared,
            version=version,
            prompts=self.selection(),
            known={name: self.of.get(name, len(own)) for name, own in self.prompts.items()},
            environments=self.environments,
            sampling=evolve(shared.sampling, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p),
            deadline=config.deadline,
        )

    @property
    def who(self) -> str:
        of_set = f" of the set {self.name!r}" if self.name else ""
        return f"validation strategy {self.config.name!r}{of_set}"


@define(kw_only=True, eq=False)
class Validation:
    """Runs everything that is due for a version, concurrently."""

    parts: Sequence[HeldOut]
    strategies: Mapping[str, ValidationStrategy]
    """The strategy of each part, by its name."""
    shared: Context
    """The context that all parts share."""
    last: int
    """The last version of the run."""
    emit: Callable[[Event], None] = field(default=lambda event: None)
    """Receives the rollouts as an event, also if a strategy fails, but not if the validation is cancelled."""
    validated: int = -1
    """The newest version for which everything due was measured."""

    async def __call__(self, version: int) -> Results:
        due = [
            part
            for part in self.parts
            if Interval(part.config.every, part.config.at_start).due(version, last=self.last)
        ]
        results = await self.measure(version, due)
        self.validated = version
        return results

    async def measure(self, version: int, parts: Sequence[HeldOut]) -> Results:
        """Measure a version by some parts, due or not; return the results of all."""
        contexts = [part.context(self.shared, version) for part in parts]
        try:
            found = await gather(
                run_strategy(part.config.name, self.strategies[part.name], context)
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
        for name, message in (left_out(groups) | lacking(groups)).items():
            self.emit(WarningRaised(step=version, cause=name, message=message))

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the strategies, by set.  Raises PluginError if one is not JSON."""
        states = {part: plugin_state(self.strategies[part.name], part.who) for part in self.parts}
        return {part.name: (part.config.name, state) for part, state in states.items() if state is not None}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from a checkpoint; return messages about strategies that are new since then.

        Raises CheckpointError if a strategy does not know its state.
        """
        notes = []
        for part in self.parts:
            strategy, saved = state.get(part.name, ("", None))
            if strategy == part.config.name:
                load_plugin_state(self.strategies[part.name], part.who, saved)
            elif strategy:
                notes.append(f"{part.who} is new since the checkpoint, which is of {strategy!r}")
        return notes
