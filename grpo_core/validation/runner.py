"""Validation: held-out prompts, rolled out by one version of the weights, measured by a strategy.

The strategies go through the same ``play`` and the same environment batching as training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import define, evolve, field

from grpo_core.contracts.errors import DeadlineExceeded, PluginError, WeightSyncError, plugin_errors
from grpo_core.contracts.incidents import report
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.protocols import Engine, Renderer, ValidationStrategy
from grpo_core.contracts.records import Group, Prompt, Rollout
from grpo_core.environments.feedback import NO_REWARD, as_number
from grpo_core.loop.metrics import OF
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, cause, derive_seed, play
from grpo_core.loop.rows import sampled_versions
from grpo_core.processes.aio import UNLIMITED, Limit, Slots, gather, raising_root_cause
from grpo_core.text.messages import readable

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
    places: Slots = field(factory=lambda: Slots(UNLIMITED))
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
        if not own or not self.environments[own[0].prompt.environment].needs_group:
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
            key = (task, request.group) if self.environments[task].needs_group else id(request)
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
                self.environments[request.prompt.environment].needs_group
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
