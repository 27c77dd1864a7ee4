"""The pipeline: four tasks that collect, train, sync and write concurrently around one buffer.

    collect   waits for   free slots in the buffer, and prompts for them where a dataloader has to read them
              does        reserves slots, then draws prompts, then plays each group in its own task
              unblocks    train
    train     waits for   prompts_per_step ready groups, and the sync of the weights published before
              does        advantages, one trainer step, publish
              unblocks    sync
    sync      waits for   published weights
              does        updates the engine, checks its canary, advances the buffer, validates when due
              unblocks    collect (its permits), train
    write     waits for   a cut that train has taken
              does        writes the checkpoint
              unblocks    train (its next cut)

All waiting is ``_changes.until``, and every change of state is followed by ``_changes.notify()``.  The
buffer decides, the pipeline waits.  An error anywhere ends the run; nothing is caught and only logged.

An error in one part must not lose what the trainer has learnt.  The training and the writing of a checkpoint
are therefore not cancelled with the others: the current step is finished, and then the newest finished step
is saved, as after ctrl-C.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from math import isfinite
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from attrs import define, evolve, field, frozen

from grpo_core.contracts import events
from grpo_core.contracts.errors import (
    ConfigError,
    DataPlaneError,
    DeadlineExceeded,
    GrpoError,
    TrackingError,
    TrainerError,
    WeightSyncError,
    describe,
    one_line,
    shortened,
)
from grpo_core.contracts.incidents import report
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.protocols import (
    AdvantageFunction,
    DataPlane,
    Engine,
    Renderer,
    RestingEngine,
    Shaping,
    Trainer,
)
from grpo_core.contracts.records import (
    Batch,
    Group,
    Prompt,
    Rollout,
    SampleRequest,
    Slot,
    StepResult,
    Weights,
)
from grpo_core.data.samplers import PromptStream
from grpo_core.loop import canary, health
from grpo_core.loop.agreement import Tolerance
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.canary import Canaries
from grpo_core.loop.dynamic import DynamicSampling, Rejection
from grpo_core.loop.endings import Failure, Saves, TimeLimit
from grpo_core.loop.hints import Hints
from grpo_core.loop.metrics import Meter, left_out, task_metrics, times
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, cause, derive_seed, play
from grpo_core.loop.rows import check_staleness, make_batch, sampled_versions, shaped_rewards, with_advantages
from grpo_core.loop.timeline import during, stage, take_spans
from grpo_core.loop.versions import Interval
from grpo_core.processes.aio import (
    DEATH_IS_SEEN,
    UNLIMITED,
    Changes,
    FairSemaphore,
    cancel,
    gather,
    raising_root_cause,
    root_cause,
    time_limit,
)
from grpo_core.storage.planes import MemoryPlane

T = TypeVar("T")

Validate = Callable[[int], Awaitable[Mapping[str, Mapping[str, float]] | None]]
"""Measures the weights of a version that is due; returns None if it will emit the results itself, later."""

Written = Callable[[], Awaitable[Path]]
"""Wait until a checkpoint is complete, and return its directory."""

ObserveAttempt = Callable[[str, Sequence[Rollout], int], None]
"""Receives the task, the rollouts of an attempt at a group, and the number of attempts that failed before."""

Save = Callable[[int, Failure | None], Awaitable[Written]]
"""Takes the cut at a version before its first await, and returns when training may continue.

A checkpoint made because of a failure does not remove others.
"""

Watch = Callable[[], Coroutine[Any, Any, None]]
"""Raises if a part that runs next to the pipeline died."""


async def _nothing_to_flush() -> None:
    return


@frozen(kw_only=True)
class Schedule:
    """When validation and checkpoints are due, and how long waits may last."""

    validations: Sequence[Interval] = ()
    """A version is validated if it is due in one of them."""
    save_every: int = 0
    """Steps from one checkpoint to the next; 0 is none by steps."""
    save_seconds: float = 0.0
    """Least seconds from one checkpoint to the next; 0 is none by time."""
    stall: float = 86400.0
    """Seconds that a wait may last before the run ends: the backstop behind all other deadlines."""
    rollout_deadline: float | None = None
    ending: float = 7200.0
    """Seconds that a failed run may take to finish its step and save it."""
    sync_deadline: float | None = None
    """Seconds that an engine may take to load new weights, and again to answer the canary."""
    in_flight_updates: bool = True
    time_limit: TimeLimit | None = None
    """Ends the run in time for a last checkpoint, on the clock of the event loop."""
    pause_to_validate: bool = False
    """Whether steps and groups wait while validation runs; it starts when the current ones have ended."""


@define(kw_only=True, eq=False)
class Playing:
    """How the groups of a run are played."""

    environments: Mapping[str, EnvironmentClient]
    renderer: Renderer
    sampling: SamplingParams
    group_size: int
    places: FairSemaphore = field(factory=lambda: FairSemaphore(UNLIMITED))
    """Limits how many rollouts are played at the same time."""
    seed: int = 0


@define(kw_only=True, eq=False)
class Learning:
    """Computes the advantages of groups, and filters groups without a signal."""

    advantages: AdvantageFunction
    all_rows: bool = False
    """Rows with advantage 0 are trained as well, because the loss needs them."""
    shaping: Shaping | None = None
    """Shapes the rewards that the advantages compare; None compares the environment's."""
    dynamic: DynamicSampling | None = None
    """Filters groups without a learning signal; None trains all groups."""
    hints: Hints | None = None
    """Renders the hints that the loss learns from; None if it learns from none."""
    needs_hints: bool = False
    """Whether a run in which no environment hints ends after its first step."""

    def with_advantages(self, groups: Sequence[Group]) -> list[Group]:
        """Return the groups of a step with their advantages."""
        return with_advantages(groups, self.advantages, shaping=self.shaping, all_rows=self.all_rows)

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Return metrics of a step's rewards and of the groups filtered since the last one."""
        shaped = shaped_rewards(self.shaping(groups)) if self.shaping is not None else {}
        hinted = self.hints.read() if self.hints is not None else {}
        return {**shaped, **hinted, **(self.dynamic.read() if self.dynamic is not None else {})}


@define(kw_only=True, eq=False)
class Checks:
    """Checks that end a run which cannot learn."""

    observe_attempt: ObserveAttempt = lambda task, rollouts, attempts: None
    """Counts lost and unscored rollouts of each attempt at a group, and raises when there are too many."""
    canary: Sequence[tuple[int, ...]] = ()
    """Prompts (token ids) that check the engine after the first syncs; see ``grpo_core.loop.canary``."""
    tolerance: Tolerance = field(factory=Tolerance)
    """Tolerance of the canary."""
    limits: Mapping[str, health.Thresholds] = field(factory=dict)
    """Health limits by metric."""
    correction: str = ""
    """The options of the loss that correct for older weights, as text."""
    uncorrected: str = ""
    """Why nothing corrects for older weights; empty if something does."""
    watch: Sequence[Watch] = ()
    """Background watchers; each raises if a process that the run needs has died."""


@define(kw_only=True, eq=False)
class Pipeline:
    """Runs the four tasks of the module's docstring.  ``run`` may be called once."""

    buffer: Buffer[Prompt, Group]
    prompts: PromptStream
    engine: Engine
    playing: Playing
    plane: DataPlane = field(factory=lambda: MemoryPlane(None))
    """Keeps the tokens of the groups that wait to be trained."""
    learning: Learning
    trainer: Trainer
    checks: Checks = field(factory=Checks)
    schedule: Schedule = field(factory=Schedule)
    emit: Callable[[events.Event], None] = lambda event: None
    flush: Callable[[], Awaitable[None]] = _nothing_to_flush
    """Returns when all events until now are on disk: a checkpoint must not be newer than its events."""
    readings: Callable[[], Mapping[str, float]] = dict
    """Returns metrics from outside the loop since its last call, such as incidents."""
    validate: Validate | None = None
    validate_first: bool = True
    """Whether the first version is still to be measured: the run is new, or stopped before that."""
    save: Save | None = None
    resting: Sequence[RestingEngine] = ()
    """Engines on the trainer's GPU: they rest while it computes a step."""

    canaries: Canaries = field(init=False)
    """The canaries, with the newest version that is proved."""
    _changes: Changes = field(init=False, factory=Changes)
    _hinted: bool = field(init=False, default=False)
    """Whether an environment has given a hint."""
    _published: Weights | None = field(init=False, default=None)
    _training: asyncio.Task[None] | None = field(init=False, default=None)
    _writing: asyncio.Task[None] | None = field(init=False, default=None)
    """Writes the newest cut."""
    _failing: bool = field(init=False, default=False)
    """Whether another part has failed, so that training ends after its step."""
    _trained: int = field(init=False, default=0)
    _changing: bool = field(init=False, default=False)
    """Whether the trainer is in a step, or failed in one."""
    _saves: Saves = field(init=False)
    _kept: int = field(init=False, default=0)
    """Step of the newest complete checkpoint, or the step that this process began with."""
    _measured: int = field(init=False, default=-1)
    """The newest version whose validation is done, if it was due."""
    _stopping: str = field(init=False, default="")
    """Why the run ends before its last step."""
    _leaving: bool = field(init=False, default=False)
    """Whether the run ends as soon as possible: everything but a step and a checkpoint is dropped."""
    _droppable: set[asyncio.Task[None]] = field(init=False, factory=set)
    """Running tasks that are dropped when the run ends."""
    _paused: bool = field(init=False, default=False)
    _stepping: asyncio.Lock = field(init=False, factory=asyncio.Lock)
    """Held during a trainer step, and during a validation that pauses training."""
    _meter: Meter = field(init=False, factory=Meter)
    _recent: deque[Mapping[str, float]] = field(init=False, factory=lambda: deque(maxlen=health.WINDOW))
    _carried: frozenset[int] = field(init=False, default=frozenset())
    """Slots of the groups that were finished before the run was resumed."""

    def __attrs_post_init__(self) -> None:
        self.canaries = Canaries(list(self.checks.canary))

    # ------------------------------------------------------------------------------ public methods

    async def run(self) -> str:
        """Train until the last step or until ``stop``; return "finished", or the reason of the stop.

        Raises the first error of any task, after the other tasks have been cancelled and have ended.  The
        newest finished step is saved first if possible; a note of the error says so.
        """
        began = self._trained = self._kept = self.buffer.step
        with raising_root_cause():
            self._carried = await self._place_carried()
            try:
                await self._run()
            except ExceptionGroup as group:
                await self._keep_work(root_cause(group), began)
                raise
            finally:
                await cancel([task for task in (self._training, self._writing) if task is not None])
        last = self.buffer.num_steps
        complete = self.buffer.version == last and (self._measured == last or not self._is_due(last))
        return "finished" if complete else self._stopping

    async def _run(self) -> None:
        self._measured = -1 if self.validate_first else self._trained
        async with asyncio.TaskGroup() as tasks:
            watches = [tasks.create_task(died(), name="watch") for died in self.checks.watch]
            stage("first weight sync")
            weights = self.canaries.published(await self.trainer.publish(self.canaries.contexts))
            await self._unless_leaving(self._update_engine(weights))
            if self.validate_first:
                stage("first validation")
                await self._validate(self._trained)
            self._meter.begin()
            self._saves = Saves(self.schedule.save_every, self.schedule.save_seconds, self._meter.now())
            background = [
                tasks.create_task(self._collect(), name="collect"),
                tasks.create_task(self._sync(), name="sync"),
                tasks.create_task(self._write(), name="write"),
                tasks.create_task(self._stop_in_time(), name="time limit"),
                *watches,
            ]
            self._training = asyncio.create_task(self._train(), name="train")
            try:
                await asyncio.shield(self._training)
            except asyncio.CancelledError:  # another part has failed
                self._failing = True
                self.stop("failed")
                raise
            if self._trained == self.buffer.num_steps > self._measured:
                stage("last validation")
                await self._unless_leaving(self._measure(self._trained))
            stage("end")
            for task in background:
                task.cancel()

    async def _place_carried(self) -> frozenset[int]:
        """Put the groups of a checkpoint into the data plane; return their slots."""
        ready = self.buffer.state_dict()["ready"]
        if ready:
            stage("finished groups to the data plane")
        for slot, group in ready:
            self.canaries.finished(group)
            self.buffer.exchange(slot, await self.plane.put(group))
        return frozenset(slot.id for slot, _ in ready)

    def stop(self, reason: str = "interrupted", *, at_leisure: bool = False) -> None:
        """End the run after the current step, with a checkpoint.

        Other work, such as a validation or a weight sync, is dropped and repeated by a resumed run.  With
        ``at_leisure`` it is finished.
        """
        self._stopping = self._stopping or reason
        if not at_leisure:
            self._leaving = True
            for task in self._droppable:
                task.cancel()
        self._changes.notify()

    @property
    def in_step(self) -> bool:
        """Whether the groups of a step are taken, and the step has not ended."""
        return self.buffer.step > self._trained

    async def _unless_leaving(self, work: Coroutine[Any, Any, None]) -> None:
        """Run work that is dropped when the run leaves."""
        task, me = asyncio.create_task(work), asyncio.current_task()
        self._droppable.add(task)
        if self._leaving:
            task.cancel()
        try:
            await task
        except (asyncio.CancelledError, Exception):
            if not self._leaving or (me is not None and me.cancelling()):
                raise
        finally:
            self._droppable.discard(task)

    async def _stop_in_time(self) -> None:
        """Stop when a step and the checkpoints that may follow would use up the rest of the time limit."""
        limit, now = self.schedule.time_limit, asyncio.get_running_loop().time
        while limit is not None and (left := limit.left(now())) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):  # less is left after something has taken longer than before
                    await self._changes.until(lambda: limit.left(now()) <= 0)
        if limit is not None:
            self.stop("out of time")

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        """Measure how long a part of the run takes, for the time limit."""
        now = asyncio.get_running_loop().time
        began = now()
        yield
        if self.schedule.time_limit is not None:
            self.schedule.time_limit.observe(part, now() - began)
            self._changes.notify()

    # ------------------------------------------------------------------------------ collect

    async def _collect(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                for slot in await self._changes.until(self._reserve):
                    groups.create_task(self._play_group(slot), name=f"group {slot.id}")

    def _reserve(self) -> list[Slot[Prompt]] | None:
        """Reserve slots first, draw prompts second; nothing awaits in between, so every cut is consistent."""
        if self._paused or self._leaving:
            return None
        if (wanted := self.buffer.wanted) and not self.prompts.ready(wanted, self._changes.notify):
            return None
        slots = self.buffer.reserve()
        if slots is None:
            return None
        if slots[0].prompt is None:
            request = SampleRequest(
                generation_version=slots[0].generation_version,
                target_version=slots[0].target_version,
                current_version=self._trained,
                expected_prompts=len(slots),
            )
            slots = self.buffer.assign(slots, self.prompts.draw(request))
            for event in self.prompts.passed_over:
                self.emit(evolve(event, step=self._trained))
            self.prompts.passed_over.clear()
        self.emit(events.Dispatched(step=self._trained, slots=tuple(slots)))
        return slots

    async def _play_group(self, slot: Slot[Prompt]) -> None:
        prompt = slot.prompt
        assert prompt is not None
        requests = [
            RolloutRequest(
                prompt=prompt,
                seed=derive_seed(self.playing.seed, slot.id, slot.attempts, i),
                group=str(slot.id),
            )
            for i in range(self.playing.group_size - len(slot.partial_rollouts))
        ]
        async with self.playing.places.take(len(requests)):
            with self._meter.generating:
                rollouts = await play(
                    requests,
                    engine=self.engine,
                    environments=self.playing.environments,
                    renderer=self.playing.renderer,
                    sampling=self.playing.sampling,
                    deadline=self.schedule.rollout_deadline,
                )
        if self.learning.shaping is not None:
            rollouts = list(map(self.learning.shaping.checked, rollouts))
        for rollout in rollouts:
            self._meter.count(prompt.environment, rollout)
        self.checks.observe_attempt(prompt.environment, rollouts, slot.attempts)
        finished = (*slot.partial_rollouts, *(rollout for rollout in rollouts if rollout.error is None))
        if len(finished) == self.playing.group_size:
            await self._confirmed(finished)
            group = Group(
                prompt=prompt,
                rollouts=finished,
                generation_version=slot.generation_version,
                target_version=slot.target_version,
                slot=slot.id,
            )
            if self.learning.hints is not None:
                group = await self.learning.hints.added(group, self.playing.renderer)
            rejected = None if self.learning.dynamic is None else self.learning.dynamic.rejects(group)
            if rejected is None:
                self.canaries.finished(group)
                group = await self.plane.put(group)
            self._finish(slot, group, rejected)
            self._changes.notify()
            return
        kept = (
            () if self.playing.environments[prompt.environment].about.needs_group else finished
        )  # compared: all or none
        self._fail(slot, prompt, kept, next(rollout for rollout in rollouts if rollout.error is not None))
        self._changes.notify()

    async def _confirmed(self, rollouts: Sequence[Rollout]) -> None:
        """Wait until the canary agrees with all weights that sampled these rollouts.

        Until then their group is in flight, so that a checkpoint has only tokens sampled by good weights.
        """
        if self.buffer.version == self._trained:
            return
        newest = sampled_versions(rollouts).max(initial=0)
        if self.buffer.version < newest <= self._trained:  # a version that was never published is an error
            await self._changes.until(lambda: newest <= self.buffer.version)

    def _fail(self, slot: Slot[Prompt], prompt: Prompt, kept: Sequence[Rollout], first: Rollout) -> None:
        """Offer the prompt again, or skip it; ``first`` is the first of its unscored rollouts."""
        task, error, who = prompt.environment, first.error or "", f"rollouts of task {prompt.environment!r}"
        if self.buffer.fail(slot, kept):
            left = f"{self.playing.group_size - len(kept)} of {self.playing.group_size} rollouts"
            said = f"{left} of prompt {prompt.id!r} are played again: {error}"
            report(cause(first), who, said, fault=first.fault)
            return
        self.prompts.untrained(prompt, slot.target_version)
        of_slot = events.PromptSkipped(
            step=self._trained, slot=slot.id, task=task, prompt=prompt.id, error=error, fault=first.fault
        )
        self.emit(of_slot)
        attempts = slot.attempts + 1
        report("skipped", who, f"prompt {prompt.id!r} is skipped after {attempts} attempts: {error}")

    def _finish(self, slot: Slot[Prompt], group: Group, rejected: Rejection | None) -> None:
        """Mark a group whose rollouts have all ended as ready, or filter it."""
        step, task, prompt = self._trained, group.prompt.environment, group.prompt.id
        if rejected is None:
            self.buffer.complete(slot, group)
            self.emit(events.GroupFinished(step=step, slot=slot.id, task=task, prompt=prompt))
            return
        self.buffer.filter(slot)
        self.prompts.observe([group])
        self.prompts.untrained(group.prompt, slot.target_version)
        reward = fmean([reward for reward in group.rewards if reward is not None] or [0.0])
        self.emit(
            events.GroupFiltered(
                step=step,
                slot=slot.id,
                task=task,
                prompt=prompt,
                reward=reward,
                filter=rejected.filter,
                reason=rejected.reason,
            )
        )

    # ------------------------------------------------------------------------------ train

    async def _train(self) -> None:
        while self._trained < self.buffer.num_steps:
            started = self._meter.now()
            stage("wait for groups")
            ready: list[Group] | str = await self._in_time(self._take, "ready groups")
            if isinstance(ready, str):
                break
            await self._train_step(ready, started)
        await self._synced()
        await self._save(self._trained)
        stage("wait for the checkpoint")
        await self._saved()

    def _take(self) -> list[Group] | str | None:
        """Return the next groups with their advantages, None if they are not ready, or why the run ends."""
        if self._stopping:
            return self._stopping
        groups = self.buffer.take()
        if groups is not None:
            step = self.buffer.step - 1
            check_staleness(groups, step=step, max_staleness=self.buffer.max_staleness)
            groups = self.learning.with_advantages(groups)
            self.emit(events.GroupsReady(step=step, groups=tuple(groups)))
        return groups

    async def _train_step(self, groups: Sequence[Group], started: float) -> None:
        step = self._trained
        waited = self._meter.now() - started
        batch = make_batch(groups, step=step, temperature=self.playing.sampling.temperature)
        with self._timed("step"):
            if self.resting:
                await self._synced()
            stage("wait for validation")
            async with self._stepping:
                stage("rest of engines")
                await gather([engine.rest() for engine in self.resting])
                stage("step")
                began = self._meter.now()
                with during("trainer", "step"):
                    self._changing = True
                    result = await self.trainer.step(batch)
                    self._changing = False
            ended = self._meter.now()
            parts = [
                events.Span(lane="trainer", what=f"step: {name}", begin=began, end=ended, busy=seconds)
                for name, seconds in result.parts.items()
            ]
            self._trained = result.version
            try:
                await self._synced()  # the engine may still be reading the previous weights
                await self._publish(step + 1, groups)
            finally:  # the step is done, even if its weights are not published
                metrics = self._account(groups, batch, result, parts, waited)
        self._check_health(metrics, groups)
        self._check_hints(groups)
        if self._save_is_due():
            await self._synced()
            if not self._leaving:
                await self._save(self._trained)

    async def _publish(self, version: int, trained: Sequence[Group]) -> None:
        """Publish the trainer's weights, unless the run leaves: then nobody reads them."""
        if self._leaving:
            return
        self.canaries.trained(trained)
        stage("publish")
        with during("trainer", "publish"):
            weights = await self.trainer.publish(self.canaries.contexts)
        await gather([engine.wake() for engine in self.resting])
        if weights.version != version:
            raise GrpoError(f"the trainer published version {weights.version} after step {version - 1}")
        self._published = self.canaries.published(weights)
        self._changes.notify()

    def _account(
        self,
        groups: Sequence[Group],
        batch: Batch,
        result: StepResult,
        parts: Sequence[events.Span],
        waited: float,
    ) -> dict[str, float]:
        """Report a finished step to the sampler and the trackers; return its metrics."""
        stage("account")
        spans = take_spans()
        metrics = task_metrics(groups, step=batch.step) | times(spans)
        metrics["rows"] = float(len(batch.rows))
        metrics |= {f"masked/{task}": float(count) for task, count in batch.masked.items()}
        metrics |= self.learning.metrics(groups)
        metrics |= {**result.metrics, **self.canaries.metrics()}
        metrics |= self._meter.read(self.buffer.statistics(), trained=result.metrics, waited=waited)
        try:  # these are of plugins
            self.prompts.observe(groups)
            metrics |= self.readings()
        finally:
            self.emit(events.StepEnded(step=self._trained, metrics=metrics, digest=result.digest))
        if spans:  # somebody takes the timeline down
            self.emit(
                events.TimelineExtended(step=self._trained, spans=(*spans, *parts), now=self._meter.now())
            )
        for name, message in left_out(groups).items():
            self.emit(events.WarningRaised(step=self._trained, cause=name, message=message))
        return metrics

    def _check_hints(self, groups: Sequence[Group]) -> None:
        """Warn once if the loss ignores hints; raise ConfigError if it needs some, and there were none."""
        given = any(rollout.hint is not None for group in groups for rollout in group.rollouts)
        if given and not self._hinted and self.learning.hints is None:
            said = (
                "environments give hints, from which the loss does not learn: choose one that does, such as "
                '"self_distillation", or leave them out'
            )
            self.emit(events.WarningRaised(step=self._trained, cause="hints", message=said))
        self._hinted = self._hinted or given
        if self.learning.needs_hints and not self._hinted:
            tasks = ", ".join(sorted({group.prompt.environment for group in groups}))
            raise ConfigError(
                f"the loss learns from hints, and no rollout of step {self._trained} had one: the "
                f"environments of {tasks} set neither Prompt.hint nor Feedback.hint"
            )

    def _check_health(self, metrics: Mapping[str, float], groups: Sequence[Group]) -> None:
        """Warn about metrics beyond their soft limit; raise TrainerError beyond the hard limit.

        A step that trains carried groups only warns, unless the metric is NaN: their logprobs are from before
        the resume, and the cause may be fixed by now.
        """
        carried = any(group.slot in self._carried for group in groups)
        if not carried:
            self._recent.append(metrics)
        recent = [metrics] if carried else self._recent
        findings = health.check_limits(recent, self.checks.limits, self.checks.uncorrected)
        if not carried:
            findings += health.lost_signal(recent, self.checks.correction)
        for finding in findings:
            if finding.fatal and not (carried and isfinite(finding.value)):
                raise TrainerError(f"step {self._trained}: {finding.message}")
            old = ". Some of its groups were finished before the run was resumed" if carried else ""
            self.emit(
                events.WarningRaised(
                    step=self._trained, cause=finding.metric, message=f"{finding.message}{old}"
                )
            )

    async def _synced(self) -> None:
        """Wait until the engine has the published weights, unless the run leaves without it."""
        stage("wait for the weight sync")
        await self._changes.until(lambda: self._published is None or self._leaving)

    def _save_is_due(self) -> bool:
        last = self._stopping or self._trained >= self.buffer.num_steps  # saved when the loop has ended
        return not last and self._saves.due(self._trained, self._meter.now())

    async def _save(self, version: int, failure: Failure | None = None) -> None:
        """Take a cut once the one before is written; return when training may continue.

        Raises TrainerError if a step is unfinished: the trainer may have applied a part of it.
        """
        if self.save is None:
            return
        stage("wait for the checkpoint")
        await self._saved()
        if self._failing and failure is None:  # ``_keep_work`` saves, and says why
            return
        stage("cut of the checkpoint")
        if self.buffer.step > version:
            raise TrainerError(f"the trainer may hold a part of step {self.buffer.step}, which failed")
        reason = failure.error if failure is not None else self._stopping if self._leaving else ""
        self.emit(events.Saving(step=version, reason=reason))
        self._saves.saving(self._meter.now())
        with self._timed("cut"):
            written = await self.save(version, failure)
        work = self._complete(version, written, fails=failure is not None)
        self._writing = asyncio.create_task(work, name="write")
        self._changes.notify()

    async def _saved(self) -> None:
        if self._writing is not None:
            await asyncio.shield(self._writing)

    # ------------------------------------------------------------------------------ write

    async def _write(self) -> None:
        """Raise the error of a checkpoint that cannot be written while training continues."""
        while True:
            writing = await self._changes.until(lambda: self._writing)
            await asyncio.shield(writing)
            if self._writing is writing:  # no other cut was taken at once
                self._writing = None

    async def _complete(self, version: int, written: Written, *, fails: bool) -> None:
        """Write the checkpoint of a cut; a run that ``fails`` may have lost a tracker."""
        with self._timed("save"), during("checkpoint", "write"):
            with contextlib.suppress(TrackingError) if fails else contextlib.nullcontext():
                await self.flush()
            directory = await written()
        self._kept = version
        self._saves.saved(self._meter.now())
        self.emit(events.Saved(step=version, directory=str(directory)))

    # ------------------------------------------------------------------------------ an end by an error

    async def _keep_work(self, error: BaseException, began: int) -> None:
        """Save the newest finished step after an error; a note of the error says whether it worked.

        Errors here do not hide the first one.  ``began`` is the step that this process began with.
        """
        if self._training is None or self.save is None:
            return
        if isinstance(error, TrainerError):  # the step of a trainer that is gone would never end
            self._training.cancel()
        failure = Failure(error=shortened(describe(error)), proved=self.canaries.proved)
        seconds, why = self.schedule.ending, ""
        try:
            async with time_limit(
                seconds, lambda: DeadlineExceeded(f"that has taken more than {seconds:g} s")
            ):
                await self._save_newest(failure)
        except asyncio.CancelledError:
            why = "that was interrupted"
        except Exception as second:
            why = one_line(second)
        if self._trained > began:
            error.add_note(self._note_about_saved_steps(why))

    async def _save_newest(self, failure: Failure) -> None:
        """Save the newest finished step, after the current step and the write of an earlier cut."""
        assert self._training is not None
        await asyncio.gather(self._training, return_exceptions=True)
        if self._writing is not None:
            await asyncio.gather(self._writing, return_exceptions=True)
            self._writing = None
        if self._kept == self._trained:
            return
        if self.buffer.step > self._trained and (not self._changing or await self.trainer.unchanged()):
            self._return_groups()
        try:
            await self._save(self._trained, failure)
            await self._saved()
        except DataPlaneError:
            self._return_groups(ready=True)
            self._writing = None
            await self._save(self._trained, failure)
            await self._saved()

    def _return_groups(self, *, ready: bool = False) -> None:
        """Let a resumed run regenerate the groups that cannot be trained; see ``Buffer.undo``."""
        slots = tuple(self.buffer.undo(self._trained, ready=ready))
        self.emit(events.GroupsReturned(step=self._trained, slots=slots))

    def _note_about_saved_steps(self, why: str) -> str:
        """Return which steps a failed run saved, or ``why`` some are lost."""
        last, kept = self._trained, self._kept
        if kept == last:
            return f"step {last}, the newest that was finished, is saved"
        lost = f"step {last} is lost" if kept == last - 1 else f"steps {kept + 1} to {last} are lost"
        return f"{lost}, since step {last} could not be saved: {why}"

    # ------------------------------------------------------------------------------ sync

    async def _sync(self) -> None:
        while True:
            weights = await self._changes.until(lambda: self._published)
            if not self.schedule.in_flight_updates:
                self._paused = True
                with during("sync", "wait for rollouts to end"):
                    await self._no_group_runs()
            await self._update_engine(weights)
            self._advance()
            await self._validate(weights.version)
            self._published = None
            self._changes.notify()

    def _advance(self) -> None:
        """Record that the engine generates with the next version."""
        self.buffer.advance()
        self._paused = False
        self._changes.notify()
        self.emit(events.Synced(step=self.buffer.version, unproved=self.canaries.unproved))

    async def _update_engine(self, weights: Weights) -> None:
        """Give the engine new weights; return when it generates with them and its canary agrees."""
        seconds = self.schedule.sync_deadline
        try:
            with during("sync", "update weights"):
                await canary.update(self.engine, weights, deadline=seconds)
        except WeightSyncError:
            await self._look_for_deaths()
            raise
        with during("sync", "canary"):
            found = await canary.verify(
                self.engine, weights, tolerance=self.checks.tolerance, deadline=seconds
            )
        self.canaries.verified(weights, found)

    async def _look_for_deaths(self) -> None:
        """Raise the cause if a process that the run needs just ended: other errors follow from it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DEATH_IS_SEEN):
                await gather([died() for died in self.checks.watch])

    async def _validate(self, version: int) -> None:
        """Validate one version if it is due, unless the run is stopping.

        The next weight update waits until this returns, so the version is fixed.  Training continues unless
        ``pause_to_validate`` is set.
        """
        if not self._stopping:
            await self._unless_leaving(self._measure(version))

    def _is_due(self, version: int) -> bool:
        """Whether the version is to be validated."""
        last = self.buffer.num_steps
        due = any(interval.due(version, last=last) for interval in self.schedule.validations)
        return self.validate is not None and due

    async def _measure(self, version: int) -> None:
        if self.validate is None or not self._is_due(version):
            return
        async with self._pause():
            with during("validation", "validate"):
                results = await self.validate(version)
        self._measured = version
        if results is not None:
            self.emit(events.Validated(step=version, version=version, results=results))

    @contextlib.asynccontextmanager
    async def _pause(self) -> AsyncIterator[None]:
        if not self.schedule.pause_to_validate:
            yield
            return
        self._paused = True
        try:
            await self._no_group_runs()
            async with self._stepping:
                yield
        finally:
            self._paused = False
            self._changes.notify()

    async def _no_group_runs(self) -> None:
        await self._in_time(lambda: self.buffer.in_flight == 0, "running rollouts to end")

    # ------------------------------------------------------------------------------ waiting

    async def _in_time(self, question: Callable[[], T | None], what: str) -> T:
        """Wait for an answer; other waits depend only on calls that have their own deadlines.

        Raises DeadlineExceeded after ``Schedule.stall`` seconds.
        """

        def late() -> DeadlineExceeded:
            return DeadlineExceeded(
                f"pipeline: waited {self.schedule.stall:g} s for {what} at step {self._trained}; "
                f"the buffer: {self.buffer.statistics()}"
            )

        async with time_limit(self.schedule.stall, late):
            return await self._changes.until(question)
