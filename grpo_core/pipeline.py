"""The pipeline: collect, train, sync and write, beside each other, around one buffer.

    collect   waits for   free slots in the buffer
              does        reserve, then draw prompts, then play each as a group in a task of its own
              unblocks    train
    train     waits for   prompts_per_step ready groups; the weights published before to be synced
              does        advantages, one trainer step, publish
              unblocks    sync
    sync      waits for   published weights
              does        update the engine and ask its canary, advance the buffer, validate when it is due
              unblocks    collect (its permits), train
    write     waits for   a cut that train has taken
              does        write the checkpoint
              unblocks    train (its next cut)

All waiting is in ``_when``; after every change, which ``_apply`` makes, it is asked for all who wait, so that
only those are woken who have an answer.  The buffer decides, the pipeline waits.  Whatever fails anywhere
ends the run; there is nothing that is caught and only logged.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from attrs import define, field, frozen

from grpo_core import health
from grpo_core.aio import raising_root_cause
from grpo_core.buffer import Buffer, Slot
from grpo_core.dynamic import DynamicSampling
from grpo_core.engines import canary
from grpo_core.errors import DeadlineExceeded, GrpoError, TrainerError, WeightSyncError
from grpo_core.events import (
    Dispatched,
    Event,
    GroupFiltered,
    GroupFinished,
    GroupsReady,
    PromptSkipped,
    Saved,
    Saving,
    StepEnded,
    Synced,
    Validated,
    WarningRaised,
)
from grpo_core.metrics import Meter, task_metrics
from grpo_core.protocols import AdvantageFunction, Engine, EnvironmentClient, Loader, Sampler, Trainer
from grpo_core.records import Group, Prompt, Rollout, SampleRequest, Weights
from grpo_core.rendering import Renderer
from grpo_core.rollout import SamplingParams, Start, derive_seed, play
from grpo_core.rows import check_staleness, make_batch

T = TypeVar("T")

Validate = Callable[[int], Awaitable[Mapping[str, Mapping[str, float]] | None]]
"""Measures the engine's weights; gets their version.  None: the results are emitted by itself, later."""

Written = Callable[[], Awaitable[Path]]
"""Waits until a checkpoint is complete."""

Save = Callable[[int], Awaitable[Written]]
"""Takes the cut at a version, before its first await; returns when training may go on."""


@frozen(kw_only=True)
class Schedule:
    """When things are due, in steps; 0 is never, except at the end."""

    validate_every: int = 0
    save_every: int = 0
    stall: float = 86400.0
    """Seconds without any change after which a wait is a hang: the backstop behind all other deadlines."""
    rollout_deadline: float | None = None
    sync_deadline: float | None = None
    """Seconds for an engine to take new weights."""
    in_flight_updates: bool = True
    pause_to_validate: bool = False
    """No step and no group begins while validation runs; those that run come to their ends before."""


@define(kw_only=True, eq=False)
class Pipeline:
    """Connects the parts; see the module's docstring.  ``run`` may be called once."""

    buffer: Buffer[Prompt, Group]
    loaders: Mapping[str, Loader]
    sampler: Sampler
    sample: Callable[[Sampler, Mapping[str, Loader], SampleRequest], list[Prompt]]
    """Asks the sampler and checks what it returns."""
    engine: Engine
    trainer: Trainer
    environments: Mapping[str, EnvironmentClient]
    renderer: Renderer
    sampling: SamplingParams
    group_size: int
    advantages: AdvantageFunction
    dynamic: DynamicSampling | None = None
    """Filters groups that teach nothing; None trains all."""
    seed: int = 0
    schedule: Schedule = field(factory=Schedule)
    emit: Callable[[Event], None] = lambda event: None
    observe_rollout: Callable[[str, Rollout], None] = lambda task, rollout: None
    """Counts rollouts unscored; raises when there are too many."""
    validate: Validate | None = None
    save: Save | None = None
    canary: Sequence[tuple[int, ...]] = ()
    """Prompts, in tokens, that the engine is asked after each sync; see ``grpo_core.engines.canary``."""
    canary_tolerance: float = 1e-3
    """Difference of logprobs between engine and trainer after a weight sync, at most."""
    limits: Mapping[str, health.Limits] = field(factory=dict)
    """By metric."""
    watch: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()
    """Each raises when something that the run cannot do without has died, whoever waits for it."""

    _waiting: list[_Waiting] = field(init=False, factory=list)
    _asking: bool = field(init=False, default=False)
    _published: Weights | None = field(init=False, default=None)
    _taken: tuple[int, Written] | None = field(init=False, default=None)
    """Version of the cut that is being written."""
    _trained: int = field(init=False, default=0)
    _stopping: bool = field(init=False, default=False)
    _paused: bool = field(init=False, default=False)
    _stepping: asyncio.Lock = field(init=False, factory=asyncio.Lock)
    """WeightsLease by a step of the trainer, or by the validation that it has to wait for."""
    _meter: Meter = field(init=False, factory=Meter)
    _recent: deque[Mapping[str, float]] = field(init=False, factory=lambda: deque(maxlen=health.WINDOW))

    # ------------------------------------------------------------------------------ the outside

    async def run(self) -> str:
        """Train until the last step or until ``stop``; returns "finished" or "interrupted".

        Raises the first error of any task; the tasks of the others are cancelled and awaited before.
        """
        self._trained = self.buffer.step
        await self._update_engine(await self.trainer.publish(self.canary))
        if self._trained == 0:
            await self._validate(0)
        with raising_root_cause():
            async with asyncio.TaskGroup() as tasks:
                background = [
                    tasks.create_task(self._collect(), name="collect"),
                    tasks.create_task(self._sync(), name="sync"),
                    tasks.create_task(self._write(), name="write"),
                    *(tasks.create_task(died(), name="watch") for died in self.watch),
                ]
                await self._train()
                for task in background:
                    task.cancel()
        return "interrupted" if self._trained < self.buffer.num_steps else "finished"

    async def stop(self) -> None:
        """End after the step that is being trained, with a checkpoint."""
        self._apply(lambda: setattr(self, "_stopping", True))

    # ------------------------------------------------------------------------------ collect

    async def _collect(self) -> None:
        async with asyncio.TaskGroup() as groups:
            while True:
                for slot in await self._when(self._reserve, "free slots", patience=None):
                    groups.create_task(self._play_group(slot), name=f"group {slot.id}")

    def _reserve(self) -> list[Slot[Prompt]] | None:
        """Reserve first, draw second; nothing awaits in between, so every cut is consistent."""
        if self._paused:
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
            slots = self.buffer.fill(slots, self.sample(self.sampler, self.loaders, request))
        self.emit(Dispatched(step=self._trained, slots=tuple(slots)))
        return slots

    async def _play_group(self, slot: Slot[Prompt]) -> None:
        prompt = slot.prompt
        assert prompt is not None
        starts = [
            Start(prompt=prompt, seed=derive_seed(self.seed, slot.id, slot.attempts, i), group=str(slot.id))
            for i in range(self.group_size - len(slot.kept))
        ]
        with self._meter.generating():
            rollouts = await play(
                starts,
                engine=self.engine,
                environments=self.environments,
                renderer=self.renderer,
                sampling=self.sampling,
                deadline=self.schedule.rollout_deadline,
            )
        for rollout in rollouts:
            self._meter.count(prompt.environment, rollout)
            self.observe_rollout(prompt.environment, rollout)
        finished = (*slot.kept, *(rollout for rollout in rollouts if rollout.reward is not None))
        if len(finished) == self.group_size:
            group = Group(
                prompt=prompt,
                rollouts=finished,
                generation_version=slot.generation_version,
                target_version=slot.target_version,
                slot=slot.id,
            )
            self._apply(lambda: self._finish(slot, group))
            return
        kept = () if self.environments[prompt.environment].needs_group else finished  # compared: all or none
        error = next(rollout.error for rollout in rollouts if rollout.error is not None)
        self._apply(lambda: self._fail(slot, kept, error))

    def _fail(self, slot: Slot[Prompt], kept: Sequence[Rollout], error: str) -> None:
        if not self.buffer.fail(slot, kept):
            assert slot.prompt is not None
            task, prompt = slot.prompt.environment, slot.prompt.id
            self.emit(PromptSkipped(step=self._trained, slot=slot.id, task=task, prompt=prompt, error=error))

    def _finish(self, slot: Slot[Prompt], group: Group) -> None:
        """All its rollouts have feedback: it waits to be trained, or is filtered."""
        step, task, prompt = self._trained, group.prompt.environment, group.prompt.id
        if self.dynamic is None or self.dynamic.keeps(group):
            self.buffer.complete(slot, group)
            self.emit(GroupFinished(step=step, slot=slot.id, task=task, prompt=prompt))
            return
        self.buffer.filter(slot)
        self._observe([group])
        reward = fmean(reward or 0.0 for reward in group.rewards)
        self.emit(GroupFiltered(step=step, slot=slot.id, task=task, prompt=prompt, reward=reward))

    def _observe(self, groups: Sequence[Group]) -> None:
        if hasattr(self.sampler, "observe"):
            self.sampler.observe(groups)

    # ------------------------------------------------------------------------------ train

    async def _train(self) -> None:
        while self._trained < self.buffer.num_steps:
            started = self._meter.now()
            groups = await self._when(self._take, "ready groups", patience=self.schedule.stall)
            if not groups:
                break
            await self._train_step(groups, started)
        await self._synced()
        await self._save(self._trained)
        await self._saved()

    def _take(self) -> list[Group] | None:
        """The groups of a step; none at all if there is to be no other step."""
        groups = [] if self._stopping else self.buffer.take()
        if groups:
            step = self.buffer.step - 1
            check_staleness(groups, step=step, max_staleness=self.buffer.max_staleness)
            self.emit(GroupsReady(step=step, groups=tuple(groups)))
        return groups

    async def _train_step(self, groups: Sequence[Group], started: float) -> None:
        step = self._trained
        waited = self._meter.now() - started
        batch = make_batch(
            groups, step=step, temperature=self.sampling.temperature, advantages=self.advantages
        )
        async with self._stepping:
            result = await self.trainer.step(batch)
        self._trained = result.version
        await self._synced()  # the engine may still be reading what was published before
        weights = await self.trainer.publish(self.canary)
        if weights.version != step + 1:
            raise GrpoError(f"the trainer published version {weights.version} after step {step}")
        self._apply(lambda: setattr(self, "_published", weights))
        self._observe(groups)
        metrics = task_metrics(groups, step=step)
        metrics |= self.dynamic.read() if self.dynamic is not None else {}
        metrics |= result.metrics
        metrics |= self._meter.read(self.buffer.statistics(), trained=result.metrics, waited=waited)
        self.emit(StepEnded(step=self._trained, metrics=metrics))
        self._check_health(metrics)
        if self._save_is_due():
            await self._synced()
            await self._save(self._trained)

    def _check_health(self, metrics: Mapping[str, float]) -> None:
        """Raises TrainerError if a metric of the last steps is beyond its hard limit."""
        self._recent.append(metrics)
        for finding in health.check_limits(self._recent, self.limits):
            if finding.fatal:
                raise TrainerError(f"step {self._trained}: {finding.message}")
            self.emit(WarningRaised(step=self._trained, cause=finding.metric, message=finding.message))

    async def _synced(self) -> None:
        await self._when(lambda: True if self._published is None else None, "the weight sync", patience=None)

    def _save_is_due(self) -> bool:
        every = self.schedule.save_every
        last = self._stopping or self._trained >= self.buffer.num_steps  # saved when the loop has ended
        return bool(every) and self._trained % every == 0 and not last

    async def _save(self, version: int) -> None:
        """Take a cut, when the one before is written; returns when training may go on."""
        if self.save is not None:
            await self._saved()
            self.emit(Saving(step=version))
            written = await self.save(version)
            self._apply(lambda: setattr(self, "_taken", (version, written)))

    async def _saved(self) -> None:
        await self._when(lambda: True if self._taken is None else None, "the checkpoint", patience=None)

    # ------------------------------------------------------------------------------ write

    async def _write(self) -> None:
        while True:
            version, written = await self._when(lambda: self._taken, "a cut", patience=None)
            directory = await written()
            self.emit(Saved(step=version, directory=str(directory)))
            self._apply(lambda: setattr(self, "_taken", None))

    # ------------------------------------------------------------------------------ sync

    async def _sync(self) -> None:
        while True:
            weights = await self._when(lambda: self._published, "published weights", patience=None)
            if not self.schedule.in_flight_updates:
                self._paused = True
                await self._no_group_runs()
            await self._update_engine(weights)
            self._apply(self._advance)
            await self._validate(weights.version)
            self._apply(lambda: setattr(self, "_published", None))

    def _advance(self) -> None:
        """The engine holds the next version, and generates with it."""
        self.buffer.advance()
        self._paused = False
        self.emit(Synced(step=self.buffer.version))

    async def _update_engine(self, weights: Weights) -> None:
        """Returns when the engine holds the weights and generates with them."""
        seconds = self.schedule.sync_deadline
        try:
            async with asyncio.timeout(seconds):
                await self.engine.update_weights(weights)
        except TimeoutError:
            raise WeightSyncError(
                f"engine: update_weights() of version {weights.version} did not return within {seconds:g} s "
                "(engine.deadline)"
            ) from None
        await canary.verify(
            self.engine,
            weights,
            tolerance=self.canary_tolerance,
            deadline=self.schedule.rollout_deadline,
        )

    async def _validate(self, version: int) -> None:
        """Validate one fixed version: the next update waits, and training goes on unless it has to pause."""
        every = self.schedule.validate_every
        if self.validate is None or not every or self._stopping:
            return
        if version % every == 0 or version == self.buffer.num_steps:
            async with self._pause():
                results = await self.validate(version)
            if results is not None:
                self.emit(Validated(step=version, version=version, results=results))

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
            self._apply(lambda: setattr(self, "_paused", False))

    async def _no_group_runs(self) -> None:
        await self._when(
            lambda: True if self.buffer.in_flight == 0 else None,
            "running rollouts to end",
            patience=self.schedule.stall,
        )

    # ------------------------------------------------------------------------------ waiting

    async def _when(self, ask: Callable[[], T | None], what: str, *, patience: float | None) -> T:
        """Wait until ``ask()`` returns something.

        It is asked now and after changes; what it returns was true in that moment.
        Raises DeadlineExceeded after ``patience`` seconds.  Waits without patience depend only on calls that
        have a deadline of their own.
        """
        waiting = _Waiting(ask, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._ask_soon()
        try:
            async with asyncio.timeout(patience):
                answer: T = await waiting.answer
                return answer
        except TimeoutError:
            raise DeadlineExceeded(
                f"pipeline: waited {patience:g} s for {what} at step {self._trained}; "
                f"the buffer: {self.buffer.statistics()}"
            ) from None
        finally:
            waiting.answer.cancel()

    def _apply(self, change: Callable[[], object]) -> None:
        change()
        self._ask_soon()

    def _ask_soon(self) -> None:
        """When all that is on its way now has arrived: of groups that finish together the oldest is taken."""
        if not self._asking:
            self._asking = True
            asyncio.get_running_loop().call_soon(self._ask)

    def _ask(self) -> None:
        """Ask for all who wait, and again after each answer: giving it may have changed something."""
        self._asking = False
        asked = 0
        while asked < len(self._waiting):
            waiting = self._waiting[asked]
            if waiting.answer.done() or waiting.ask_once():
                del self._waiting[asked]
                asked = 0
            else:
                asked += 1


@define(eq=False)
class _Waiting:
    """A task in ``_when``."""

    ask: Callable[[], Any]
    answer: asyncio.Future[Any]

    def ask_once(self) -> bool:
        """Whether there is an answer; an error of the question is one, for the task that waits."""
        try:
            answer = self.ask()
        except BaseException as error:
            self.answer.set_exception(error)
            return True
        if answer is not None:
            self.answer.set_result(answer)
        return answer is not None
