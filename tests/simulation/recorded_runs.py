"""Records a simulated run of ``simulation.learner`` in a run directory, as ``grpo-core train`` leaves one."""

from __future__ import annotations

import asyncio
import errno
import functools
import hashlib
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import asdict, evolve

from grpo_core.app import making
from grpo_core.app.making import RunSetup
from grpo_core.config import Config, as_table, build, merge
from grpo_core.contracts.errors import GrpoError, TrackingError, describe, fault_of
from grpo_core.contracts.events import (
    ErrorRaised,
    Event,
    RunEnded,
    RunStarted,
    StepEnded,
    WarningRaised,
)
from grpo_core.contracts.incidents import IncidentCounts, reported_to
from grpo_core.contracts.records import Prompt
from grpo_core.data.loaders import IndexedLoader
from grpo_core.data.samplers import PromptStream
from grpo_core.diagnosis.first_look import first_look, leaks
from grpo_core.diagnosis.replies import Diagnosis
from grpo_core.engines.wrapped import LimitedEngine
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.loop.agreement import Tolerance
from grpo_core.loop.endings import Failure
from grpo_core.loop.pipeline import Pipeline, Written
from grpo_core.loop.timeline import Timeline, recorded_by
from grpo_core.plugins.host import PluginHost
from grpo_core.reporting import trackers
from grpo_core.reporting.files import DiskRoom, FilesTracker
from grpo_core.storage.run_directory import RunDirectory
from grpo_core.testing import clock
from grpo_core.validation.runner import HeldOut
from grpo_plugin_scale.engines.pool import EnginePool
from simulation.learner import CLASSES, Engine, Judge, Learner, Renderer, Tables, Task, World

BEGIN = 1.8e9
"""Time at which all simulated runs begin, in seconds since 1970."""


class Killed(BaseException):
    """kill -9: nothing is written any more."""


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings such as {"trainer.lr": 1e-6} as tables."""
    tables: dict[str, Any] = {}
    for key, value in settings.items():
        for part in reversed(key.split(".")):
            value = {part: value}
        tables = merge(tables, value)
    return tables


def record(path: Path, settings: Mapping[str, Any], world: World) -> None:
    """Simulate a run, and leave its directory at ``path``."""
    tasks = {task.name: {"env": f"./{task.name}.py"} for task in world.tasks}
    config = build([merge({"tasks": tasks}, nested(settings))])
    directory = RunDirectory.create(path, config)
    try:
        run = _Run(config, world, directory)
        clock.run(run.story(), seed=config.seed, horizon=1e9)
    except Killed:
        pass
    finally:
        directory.unlock()


class _Run:
    """One simulated run."""

    def __init__(self, config: Config, world: World, directory: RunDirectory) -> None:
        self.config, self.world, self.directory = config, world, directory
        self.step = 0
        self._rng = random.Random(f"run/{config.seed}")
        self._dead = False

    def progress(self) -> float:
        """Return the share of the run that is over."""
        return self.step / self.config.trainer.steps

    async def story(self) -> None:
        options = self.config.tracking.options.get("files", {})
        info = self.directory.info(self.config, None)
        self._files = FilesTracker(info, **options)
        self._diagnosis = Diagnosis(evolve(info, warn=self._warn))
        self._room = DiskRoom(
            self.directory.path, self.config.trainer.steps, self.emit, lambda _: int(self.world.free)
        )
        loop, timeline = asyncio.get_running_loop(), Timeline()
        self._incidents = IncidentCounts(
            lambda incident: self.emit(evolve(incident, step=self.step)), loop.time
        )
        with reported_to(self._incidents.receive), recorded_by(timeline):
            timeline.stage("start")
            engine = None
            try:
                pipeline, warnings = await self._pipeline()
                engine = pipeline.engine
                self.emit(
                    RunStarted(
                        directory=str(self.directory.path),
                        config=as_table(self.config),
                        buffer=asdict(pipeline.buffer.statistics()),
                    )
                )
                for warning in warnings:
                    self.emit(warning)
                reason = await pipeline.run()
            except GrpoError as error:
                self._incidents.flush()
                self.emit(timeline.extended(self.step))
                self.emit(ErrorRaised(step=self.step, message=describe(error), fault=fault_of(error)))
                self.emit(RunEnded(step=self.step, reason="failed"))
            else:
                self._incidents.flush()
                self.emit(timeline.extended(self.step))
                self.emit(RunEnded(step=self.step, reason=reason))
            finally:
                if engine is not None:
                    await engine.aclose()
                self._files.close()

    def emit(self, event: Event) -> None:
        if self._dead:
            return
        event = evolve(event, time=BEGIN + asyncio.get_running_loop().time())
        if isinstance(event, StepEnded):
            self.step = event.step
        trackers.call(self._files, event)
        trackers.call(self._diagnosis, event)
        if isinstance(event, StepEnded):
            self._room.event(event)
            if self.progress() >= self.world.killed_at:
                self._dead = True
                raise Killed
            if self.progress() >= self.world.full_at:
                full = OSError(
                    errno.ENOSPC, "No space left on device", f"rollouts/step-{event.step:06d}.jsonl"
                )
                told = TrackingError(
                    f"tracker 'files' failed in GroupsReady: {full}. The run needs it: fix the cause and "
                    "continue with --resume"
                )
                raise told from full

    def _warn(self, text: str, *, cause: str, step: int) -> None:
        self.emit(WarningRaised(step=step, cause=cause, message=text))

    async def _pipeline(self) -> tuple[Pipeline, Sequence[Event]]:
        config, world = self.config, self.world
        tables = Tables(world, world.tasks, config.seed)
        renderer: Any = Renderer(world, world.tasks)
        environments = self._environments()
        prompts = {task.name: self._prompts(number, task) for number, task in enumerate(world.tasks)}
        held_out = [
            HeldOut(
                config=config.validation,
                prompts={
                    task.name: self._held_out(number, task, prompts[task.name])
                    for number, task in enumerate(world.tasks)
                },
                environments=environments,
            )
        ]
        found = await first_look(config, renderer, held_out, prompts, environments)
        found |= leaks(prompts, held_out)
        warnings = [WarningRaised(step=0, cause=cause, message=text) for cause, text in found.items()]
        loaders = {name: IndexedLoader(name, own, seed=config.seed) for name, own in prompts.items()}
        chosen = config.validation
        sampler = making.sampler(config, _host())
        setup = RunSetup(config, _host())
        setup.strategies = {"": _host().make("validation_strategy", chosen.name, **chosen.options)}
        loss = making.loss(config.loss, _host())
        remarks = making.remarks_about(loss, config.trainer, config.pipeline)
        stream = PromptStream(sampler=sampler, loaders=loaders, name=config.sampler.name)
        engine = self._engine(tables)
        playing = making.playing(config.rollout, environments, renderer, seed=config.seed)
        validation = making.validation(
            setup, playing, held_out, engine, last=config.trainer.steps, emit=self.emit
        )
        pipeline = Pipeline(
            buffer=making.buffer(config),
            prompts=stream,
            engine=engine,
            playing=playing,
            learning=making.learning(config, loss, _host()),
            trainer=Learner(world, tables, config, seed=config.seed),
            checks=evolve(
                making.checks(config, remarks, environments, prompts, renderer), tolerance=Tolerance()
            ),
            schedule=making.schedule(config),
            emit=self.emit,
            readings=self._incidents.read,
            validate=validation if config.validation.measures else None,
            save=self._save if config.checkpoint.every else None,
        )
        return pipeline, warnings

    def _environments(self) -> dict[str, Any]:
        """Return an environment for each task."""
        found: dict[str, Any] = {}
        for task in self.world.tasks:
            judge = Judge(task, self.config.seed, {}, self.progress)
            judge.about = evolve(judge.about, max_turns=2 if task.tools else 1)
            found[task.name] = EnvironmentPool([judge], self.config.environment)
        return found

    def _engine(self, tables: Tables) -> Any:
        config, world = self.config, self.world

        def make(number: int) -> Any:
            last = number == config.engine.workers - 1
            factor = world.slow_member if last else 1.0
            engine = Engine(
                world, tables, number=number, seed=config.seed, factor=factor, progress=self.progress
            )
            most = config.engine.max_requests
            return LimitedEngine(engine, most) if most else engine

        workers = config.engine.workers
        return make(0) if workers == 1 else EnginePool(make, workers, deadline=config.engine.deadline)

    async def _save(self, step: int, failure: Failure | None) -> Written:
        await asyncio.sleep(self.world.cut * self._rng.uniform(0.8, 1.2))

        async def written() -> Path:
            await asyncio.sleep(self.world.write * self._rng.uniform(0.8, 1.2))
            return self.directory.checkpoints / f"step-{step:06d}"

        return written

    def _prompts(self, number: int, task: Task) -> list[Prompt]:
        rng = random.Random(f"prompts/{self.config.seed}/{task.name}")
        made = []
        for place in range(task.prompts):
            kind = task.classes[place // task.repeats % len(task.classes)]
            words = 240 if rng.random() < task.long_prompts else 6
            text = f"{number * CLASSES + kind} {_words(self.config.seed, place // task.repeats, words)}"
            made.append(Prompt(messages=text, id=str(place), environment=task.name))
        return made

    def _held_out(self, number: int, task: Task, training: Sequence[Prompt]) -> list[Prompt]:
        classes = task.held_out_classes or task.classes
        own = []
        for place in range(self.config.validation.prompts):
            if place < task.leaks:
                own.append(evolve(training[place], id=f"held out {place}"))
                continue
            kind = classes[place % len(classes)]
            text = f"{number * CLASSES + kind} {_words(self.config.seed, -1 - place)}"
            own.append(Prompt(messages=text, id=f"held out {place}", environment=task.name))
        return own


def _words(seed: int, place: int, number: int = 6) -> str:
    """Return a text that is far from the texts of all other places."""
    digits = hashlib.shake_128(f"{seed}/{place}".encode()).hexdigest(3 * number)
    return " ".join(digits[i : i + 6] for i in range(0, len(digits), 6))


@functools.cache
def _host() -> PluginHost:
    return PluginHost.discover(["algorithms"], [])
