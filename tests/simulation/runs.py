"""The real pipeline in a simulated world: virtual time, a seeded schedule, faults of every kind.

    python -m simulation.runs --seed 123 --policy deadline --max-staleness 2
    python -m simulation.runs --seeds 1000 --quiet

Pipeline, buffer, rollouts, sampler, loaders, batchers and checkpoints are the real ones; the engine, the
environments, the trainer and the disk are of ``simulation.world``.  A simulation is the whole story of
a run: it is started, dies or fails of what the dice decide, is resumed from its newest checkpoint, and in the
end a life without faults has to finish.  The laws of ``grpo_core.loop.laws`` are checked at every step of the
event loop.  The same arguments give the same story, in every process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import random
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from attrs import asdict, define, field, frozen

from grpo_core.config import EnvironmentConfig
from grpo_core.data.loaders import ShuffledIndices, TaskLoader, fingerprint
from grpo_core.data.samplers import Mix, PromptStream
from grpo_core.environments.batcher import BatchedEnvironment
from grpo_core.errors import GrpoError
from grpo_core.events import Event, GroupsReady, RunEnded, RunStarted, Saving, Synced
from grpo_core.incidents import reported_to
from grpo_core.loop import checkpoint
from grpo_core.loop.advantages import group as group_advantages
from grpo_core.loop.buffer import Buffer, Slot
from grpo_core.loop.dynamic import DynamicSampling
from grpo_core.loop.laws import Laws, Violation
from grpo_core.loop.pipeline import Pipeline, Schedule, Written
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, play
from grpo_core.protocols import EnvironmentClient
from grpo_core.records import Group, Prompt
from grpo_core.reporting.files import plain
from grpo_core.testing import clock
from grpo_core.testing.fakes import FakeRenderer
from simulation.faults import NONE, Dice, Faults
from simulation.world import (
    Memory,
    SimulatedDisk,
    SimulatedEngine,
    SimulatedEnvironment,
    SimulatedTrainer,
    Truth,
)

Policy = Literal["deadline", "in_order"]

LIVES = 4
TASKS = {"short": 1, "long": 2}
"""Turns of each task's environment."""
HORIZON = 1e6


@frozen(kw_only=True)
class Outcome:
    """How a simulation ended."""

    seed: int
    lives: tuple[str, ...]
    """How each life ended: "finished", "interrupted", "killed", or the error that it failed with."""
    violations: tuple[str, ...]
    trace: str
    """Hash of everything that happened, with its virtual time."""
    story: tuple[str, ...]
    seconds: float
    """Seconds of virtual time."""


class Killed(BaseException):
    """kill -9: nobody catches it, and what was running leaves nothing behind."""


class Broken(BaseException):
    """A law does not hold; there is no point in going on."""


class Loader(TaskLoader):
    """The real one, without torchdata underneath."""

    def _open(self) -> Any:
        if self._restored is not None:
            self._indices.load_state_dict(self._restored)
        return _Rows(self._prompts, self._indices)


class _Rows:
    def __init__(self, prompts: Sequence[Prompt], indices: ShuffledIndices) -> None:
        self._prompts, self._indices = prompts, indices

    def __iter__(self) -> Iterator[list[Prompt]]:
        return ([self._prompts[i] for i in indices] for indices in self._indices)

    def state_dict(self) -> dict[str, int]:
        return self._indices.state_dict()


class _Watched(Buffer[Prompt, Group]):
    """Says when it may have changed, so that the laws need not be checked where nothing did."""

    changed = True

    def take(self) -> list[Group] | None:
        self.changed = True
        return super().take()

    def _stamp_retry(self, slot: Slot[Prompt]) -> Slot[Prompt]:
        self.changed = True
        return super()._stamp_retry(slot)

    def _leave(self, *given: Any) -> Slot[Prompt]:
        self.changed = True
        return super()._leave(*given)


class _Prompts(list[Prompt]):
    """As every life finds them: what the loader compares is computed once."""

    @functools.cached_property
    def fingerprint(self) -> str:
        return fingerprint(list(self))


@define(eq=False)
class Simulation:
    """One run through all its lives; ``simulate`` is the way in."""

    seed: int
    policy: Policy
    max_staleness: int
    faults: Faults
    steps: int
    prompts_per_step: int
    group_size: int
    root: Path
    most_lives: int = LIVES
    """The last of them has no faults."""
    laws: Laws = field(factory=Laws)
    truth: Truth = field(factory=Truth)
    story: list[str] = field(factory=list)
    seconds: float = 0.0
    _hash: Any = field(factory=blake2b)
    _dead: bool = False
    _emitted: bool = True
    """Since the laws were checked."""
    _dynamic: bool = field(init=False)
    _dice: Dice = field(init=False)
    _disk: SimulatedDisk | None = None
    _engine: SimulatedEngine = field(init=False)
    _options: dict[str, Any] = field(init=False)
    _prompts: dict[str, list[Prompt]] = field(init=False)
    _poisoned: set[str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        rng = random.Random(f"run/{self.seed}")
        self._options = {
            "save_every": rng.choice([1, 2, 3, 5]),
            "validate_every": rng.choice([0, 3]),
            "in_flight_updates": rng.random() < 0.8,
        }
        self._dynamic = rng.random() < 0.3
        self._prompts = {
            task: _Prompts(
                Prompt(messages=f"{task} {i}", id=str(i), environment=task)
                for i in range(rng.randint(20, 60))
            )
            for task in TASKS
        }
        self._poisoned = {str(i) for i in range(60) if rng.random() < self.faults.poisoned}

    # ------------------------------------------------------------------------------ all lives

    def run(self) -> Outcome:
        lives = []
        for number in range(1, self.most_lives + 1):
            faults = self.faults if number < self.most_lives else NONE
            self._dice = Dice(f"life/{self.seed}/{number}", faults)
            lives.append(self._live(number))
            self._tell(f"life {number}: {lives[-1]}")
            if self._violated() or lives[-1] == "finished":
                break
            self._rot()
        else:
            self._broken(f"the last life, without faults, ended: {lives[-1]}")
        return Outcome(
            seed=self.seed,
            lives=tuple(lives),
            violations=tuple(map(str, self.laws.violations + self.truth.violations)),
            trace=self._hash.hexdigest()[:16],
            story=tuple(self.story),
            seconds=self.seconds,
        )

    def _live(self, number: int) -> str:
        """From the start, or from the newest checkpoint, to whatever end."""
        self._dead = False
        try:
            pipeline, sampler, found = self._assemble()
        except GrpoError as error:
            self._broken(f"cannot be resumed: {error}")
            return "failed"
        step = found.step if found else 0
        for reason in found.passed_over if found else ():
            self._tell(f"passed over {reason}")
        self.truth.resumed(step)
        drawn, dispatched = sampler.drawn, pipeline.buffer.statistics().dispatched
        if drawn != dispatched:
            self._broken(f"the sampler goes on after {drawn} prompts, the buffer after {dispatched}")
        self._emit(
            RunStarted(
                step=step,
                directory="",
                config=self._config(),
                resumed=found is not None,
                buffer=asdict(pipeline.buffer.statistics()),
            )
        )
        dice = self._dice.random
        kill_at = dice.randrange(1500) if self._dice.happens("kill") else -1
        stop_at = dice.uniform(0, 40) if self._dice.happens("stop") else None
        loop_steps, buffer = 0, pipeline.buffer
        assert isinstance(buffer, _Watched)

        def watch() -> None:
            nonlocal loop_steps
            loop_steps += 1
            if loop_steps == kill_at:
                self._tell(f"kill -9 at step {loop_steps} of the loop")
                self._die()
            if self._dead:
                raise Killed
            if self._emitted or buffer.changed:
                self._emitted = buffer.changed = False
                self.laws.check(buffer.statistics())
            if self._violated():
                raise Broken

        ended = self._until_its_end(self._story(pipeline, stop_at), f"{self.seed}/{number}", watch)
        if not self._dead:
            self._settle(pipeline, ended)
        return ended

    def _until_its_end(self, story: Any, seed: str, watch: Callable[[], None]) -> str:
        try:
            with reported_to(lambda incident: self._tell(f"survived: {incident.kind}: {incident.message}")):
                ended: str = clock.run(
                    story, seed=random.Random(seed).getrandbits(32), horizon=HORIZON, watch=watch
                )
            return ended
        except Killed:
            return "killed"
        except Broken:
            return "broken"
        except clock.Deadlock as deadlock:
            self._broken(f"deadlock: {deadlock}")
            return "deadlock"
        except GrpoError as error:
            if not self._dice.fatal:
                self._broken(f"failed without reason: {type(error).__name__}: {error}")
            return f"failed: {type(error).__name__}: {error}".split("\n")[0]
        except Exception as error:
            self._broken(f"an error that is none of ours: {type(error).__name__}: {error}")
            return f"failed: {type(error).__name__}"

    async def _story(self, pipeline: Pipeline, stop_at: float | None) -> str:
        loop = asyncio.get_running_loop()
        if stop_at is not None:
            loop.call_later(stop_at, lambda: stops.append(loop.create_task(pipeline.stop())))
        stops: list[asyncio.Task[None]] = []
        try:
            return await pipeline.run()
        finally:
            self.seconds += loop.time()
            for environment in pipeline.environments.values():
                with contextlib.suppress(RuntimeError):
                    await environment.aclose()  # type: ignore[attr-defined]

    def _settle(self, pipeline: Pipeline, ended: str) -> None:
        """A life that ended by itself leaves everything in order."""
        reason = ended if ended in ("finished", "interrupted") else "failed"
        self._emit(RunEnded(step=pipeline.buffer.step, reason=reason))
        if reason == "failed":
            return
        if self._dice.fatal:
            self._broken(f"went on after {self._dice.fatal}")
        found = checkpoint.newest(self._checkpoints)
        if found is None or found.step != pipeline.buffer.step:
            self._broken(f"{ended} at step {pipeline.buffer.step}, but the newest checkpoint is {found}")
        if pipeline.engine.running:  # type: ignore[attr-defined]
            self._broken(f"{ended}, and the engine still generates")

    @property
    def _checkpoints(self) -> Path:
        return self.root / "checkpoints"

    # ------------------------------------------------------------------------------ death

    def _die(self) -> None:
        """From now on nothing that happens counts; dead men tidy nothing."""
        assert self._disk is not None
        self._dead = self._disk.dead = True
        if self._dice.happens("power_cut"):
            self._tell("and the power fails")
            self._disk.cut_power(self._dice.random)

    def _rot(self) -> None:
        """Damage the newest checkpoint that holds, if there is another to go on from."""
        named = [directory for _, directory in checkpoint.complete_names(self._checkpoints)]
        if len(named) < 2 or not self._dice.happens("rot"):
            return
        whole = [directory for directory in named if checkpoint.fault(directory) is None]
        if len(whole) > 1:
            assert self._disk is not None
            self._disk.rot(whole[-1] / "pipeline.json", self._dice.random)
            self._tell(f"a byte of {whole[-1].name} has changed")

    # ------------------------------------------------------------------------------ the parts

    def _assemble(self) -> tuple[Pipeline, Mix, checkpoint.Found | None]:
        found = checkpoint.newest(self._checkpoints)
        memory = Memory()
        self._disk = disk = SimulatedDisk(self.root, self._disk, self._dice, self._tell, self._die)
        resume_from = found.directory if found else None
        trainer = SimulatedTrainer(self._dice, memory, self.truth, disk, resume_from)
        engine = SimulatedEngine(self._dice, memory, self.truth, self._tell)
        self._engine = engine
        loaders = {task: Loader(task, self._prompts[task], seed=self.seed) for task in TASKS}
        sampler = Mix({"short": 2.0}, seed=self.seed)
        stream = PromptStream(sampler=sampler, loaders=loaders, name="mix")
        buffer = _Watched(
            prompts_per_step=self.prompts_per_step,
            max_staleness=self.max_staleness,
            num_steps=self.steps,
            policy=self.policy,
        )
        if found is not None:
            checkpoint.restore(found.directory, buffer, loaders, stream)

        async def save(step: int) -> Written:
            return await checkpoint.begin(
                self._checkpoints,
                step=step,
                pipeline=checkpoint.cut(buffer, stream),
                loaders={task: loader.state_dict() for task, loader in loaders.items()},
                save_trainer=trainer.save,
                keep=2,
                disk=disk,
            )

        sampling = SamplingParams(temperature=1.0, max_tokens=8)
        environments = self._environments()
        pipeline = Pipeline(
            buffer=buffer,
            draw=stream.draw,
            observe=stream.observe,
            engine=engine,
            trainer=trainer,
            environments=environments,
            renderer=FakeRenderer(),
            sampling=sampling,
            group_size=self.group_size,
            advantages=group_advantages,
            dynamic=DynamicSampling(max_extra_groups=1000) if self._dynamic else None,
            seed=self.seed,
            schedule=Schedule(rollout_deadline=90.0, stall=3600.0, **self._options),
            emit=self._emit,
            validate=lambda version: self._validate(version, engine, environments, sampling),
            save=save,
        )
        return pipeline, sampler, found

    def _environments(self) -> dict[str, EnvironmentClient]:
        config = EnvironmentConfig(max_batch=16, max_wait=0.01)
        return {
            task: BatchedEnvironment(
                SimulatedEnvironment(task, self._dice, self._tell, max_turns=turns, poisoned=self._poisoned),
                config,
            )
            for task, turns in TASKS.items()
        }

    async def _validate(
        self,
        version: int,
        engine: SimulatedEngine,
        environments: Mapping[str, EnvironmentClient],
        sampling: SamplingParams,
    ) -> Mapping[str, Mapping[str, float]]:
        """All tokens of a validation are of one version."""
        requests = [
            RolloutRequest(prompt=prompt, seed=i) for i, prompt in enumerate(self._prompts["short"][:3])
        ]
        rollouts = await play(
            requests,
            engine=engine,
            environments=environments,
            renderer=FakeRenderer(),
            sampling=sampling,
            deadline=90.0,
        )
        met = {v for rollout in rollouts for v in rollout.tokens.versions.tolist()}
        if met - {version}:
            self._broken(f"validation of version {version} met {met}")
        return {"short": {"accuracy": 0.0}}

    def _config(self) -> dict[str, Any]:
        return {
            "trainer": {"prompts_per_step": self.prompts_per_step, "steps": self.steps},
            "pipeline": {"max_staleness": self.max_staleness, "policy": self.policy},
            "rollout": {"max_retries": 3, "group_size": self.group_size},
            "sampler": {"name": "mix"},
            "validation": {"every": self._options["validate_every"]},
            "checkpoint": {"every": self._options["save_every"]},
        }

    # ------------------------------------------------------------------------------ what is seen

    def _emit(self, event: Event) -> None:
        if self._dead:
            return
        record = plain(event)
        self._tell(f"{record}")
        self._emitted = True
        self.laws.observe(record)
        match event:
            case GroupsReady():
                self.truth.groups(event.step, event.groups)
            case Saving():
                self.truth.saving(event.step)
            case Synced() if self._engine.version != event.step:
                self._broken(f"version {event.step} is synced, the engine holds {self._engine.version}")

    def _tell(self, line: str) -> None:
        try:
            at = asyncio.get_running_loop().time()
        except RuntimeError:
            at = 0.0
        self.story.append(f"{at:9.3f}  {line.replace(str(self.root), '')}")
        self._hash.update(self.story[-1].encode())

    def _violated(self) -> bool:
        return bool(self.laws.violations or self.truth.violations)

    def _broken(self, what: str) -> None:
        self.truth.violations.append(Violation("story", 0, what))


def simulate(
    seed: int,
    *,
    policy: Policy,
    max_staleness: int,
    faults: Faults = Faults(),  # noqa: B008 - frozen
    steps: int = 12,
    prompts_per_step: int = 8,
    group_size: int = 4,
    lives: int = LIVES,
) -> Outcome:
    """Simulate a run of ``steps * prompts_per_step`` prompts, in groups of ``group_size``, to its end.

    It has so many ``lives`` at most, the last of them without faults.
    """
    memory = Path("/dev/shm")
    scratch = tempfile.mkdtemp(prefix="grpo-core-", dir=memory if memory.is_dir() else None)
    try:
        return Simulation(
            seed, policy, max_staleness, faults, steps, prompts_per_step, group_size, Path(scratch), lives
        ).run()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Tell the story of a seed, or look for the first of many that breaks a law."""
    parser = argparse.ArgumentParser(prog="python -m simulation.runs", description=main.__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1, help="so many from --seed on")
    parser.add_argument("--policy", choices=["deadline", "in_order"], help="default: both in turn")
    parser.add_argument("--max-staleness", type=int, help="default: 0 to 4 in turn")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="only the feedback")
    given = parser.parse_args(arguments)
    for seed in range(given.seed, given.seed + given.seeds):
        policy: Policy = given.policy or ("deadline", "in_order")[seed % 2]
        max_staleness = seed // 2 % 5 if given.max_staleness is None else given.max_staleness
        outcome = simulate(
            seed,
            policy=policy,
            max_staleness=max_staleness,
            faults=NONE if given.no_faults else Faults(),
        )
        if not given.quiet:
            print("\n".join(outcome.story))
        if not given.quiet or outcome.violations:
            where = f"seed {seed}, {policy}, max_staleness {max_staleness}"
            print(f"{where}: {'; '.join(outcome.violations) or 'all laws hold'}")
            print(f"lives: {', '.join(outcome.lives)}; trace {outcome.trace}")
        if outcome.violations:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
