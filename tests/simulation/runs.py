"""The real pipeline in a simulated world: virtual time, a seeded schedule, faults of every kind.

    python -m simulation.runs --seed 123 --policy deadline --max-staleness 2
    python -m simulation.runs --seeds 1000 --quiet

Pipeline, buffer, rollouts, samplers, loaders, queues, the pool of engines, the canary, the health limits,
validation and checkpoints are the real ones; engines, environments, the trainer, the validation strategy and
the disk are of ``simulation.world``.  A simulation is the whole story of a run: it is started, dies or fails
of what the dice decide, is resumed from its newest checkpoint, and in the end a life without faults has to
finish.  The laws of ``grpo_core.loop.laws`` are checked at every step of the event loop.  The same arguments
give the same story, in every process.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import random
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from fractions import Fraction
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from attrs import asdict, define, evolve, field, frozen
from pooled import statistics

from grpo_core.app import making
from grpo_core.config import EnvironmentConfig, ValidationConfig
from grpo_core.contracts.errors import GrpoError
from grpo_core.contracts.events import (
    Event,
    GroupFiltered,
    GroupsReady,
    GroupsReturned,
    PromptSkipped,
    RunEnded,
    RunStarted,
    Saving,
    StepEnded,
    Synced,
)
from grpo_core.contracts.incidents import reported_to
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.protocols import ValidationStrategy
from grpo_core.contracts.records import Group, Prompt, Rollout, Slot
from grpo_core.data.loaders import IndexedLoader, hash_of
from grpo_core.data.samplers import Mix, PromptStream, WeightedTaskSampler
from grpo_core.environments.outages import JITTER
from grpo_core.environments.pool import EnvironmentPool, Places
from grpo_core.loop import checkpoint
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.dynamic import DynamicSampling
from grpo_core.loop.endings import Failure
from grpo_core.loop.health import Thresholds
from grpo_core.loop.laws import Laws, Violation
from grpo_core.loop.pipeline import Checks, Learning, Pipeline, Playing, Schedule, Written
from grpo_core.loop.rollout import LostBudget, SamplingParams
from grpo_core.loop.rows import group as group_advantages
from grpo_core.loop.versions import Interval
from grpo_core.processes.memory import spare_the_collector
from grpo_core.reporting.files import plain
from grpo_core.testing import clock
from grpo_core.validation.runner import Context, HeldOut, Results, Validation
from grpo_plugin_algorithms import filters
from grpo_plugin_algorithms.shaping import Shaping, ShapingConfig
from grpo_plugin_curriculum.curriculum import Curriculum
from grpo_plugin_curriculum.learnable_prompts import LearnablePrompts
from grpo_plugin_scale.engines.pool import EnginePool
from simulation.agents import SimulatedEndpoint
from simulation.faults import DROPPED, NONE, Dice, Faults
from simulation.ranks import SimulatedRanks
from simulation.world import (
    DIFFERENCE,
    ENGINE_DEADLINE,
    HELD_OUT,
    HELD_OUT_SET,
    RESTART,
    TEMPERATURE,
    Memory,
    Rules,
    SimulatedDisk,
    SimulatedEngine,
    SimulatedEnvironment,
    SimulatedRenderer,
    SimulatedTrainer,
    SimulatedValidation,
    Truth,
)

Policy = Literal["deadline", "in_order"]

LIVES = 4
TASKS = {"short": 1, "long": 2, "ranked": 2}
"""Turns of each task's environment."""
WEIGHTS = {"short": 4.0}
COMPARED = {task: task == "ranked" for task in TASKS}
"""Whether its environment compares the rollouts of a group."""
MAX_RETRIES = 3
HORIZON = 1e6


@frozen(kw_only=True)
class Outcome:
    """How a simulation ended."""

    seed: int
    lives: tuple[str, ...]
    """How each life ended: "finished", "interrupted", "stopped at once", "killed", or its error."""
    violations: tuple[str, ...]
    trace: str
    """Hash of everything that happened, with its virtual time."""
    story: tuple[str, ...]
    seconds: float
    """Seconds of virtual time."""
    weights: str
    """Digest of the last weights."""
    happened: frozenset[str]
    """The faults that happened."""


class Killed(BaseException):
    """kill -9: nobody catches it, and what was running leaves nothing behind."""


class Broken(BaseException):
    """A law does not hold; there is no point in continuing."""


AGENTS_AT_ONCE = 3
"""Rollouts of an agent that its process plays at once: fewer than a group, so that they wait."""


class _Pool(EnvironmentPool):
    """Sees sessions that are closed twice."""

    def __init__(self, *given: Any, truth: Truth) -> None:
        super().__init__(*given)
        self._truth = truth
        self._closed: set[str] = set()

    async def close(self, sessions: Sequence[str]) -> None:
        twice = [session for session in sessions if session in self._closed]
        self._truth.law(not twice, 0, f"{len(twice)} sessions are closed twice")
        self._closed.update(sessions)
        await super().close(sessions)


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
        return hash_of(list(self))


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
    members: int | None = None
    """Number of engines in a pool, 0 for an engine without one; None: as the seed decides."""
    agents: Sequence[str] | None = None
    """Tasks that agents play; None: as the seed decides."""
    ranks: int | None = None
    """Number of the trainer's ranks; None: as the seed decides, perhaps others in each life."""
    laws: Laws = field(factory=Laws)
    truth: Truth = field(init=False)
    story: list[str] = field(factory=list)
    seconds: float = 0.0
    _hash: Any = field(factory=blake2b)
    _dead: bool = False
    _emitted: bool = True
    """Since the laws were checked."""
    _dynamic: bool = field(init=False)
    _dice: Dice = field(init=False)
    _disk: SimulatedDisk | None = None
    _memory: Memory = field(init=False)
    _engines: list[SimulatedEngine] = field(init=False)
    """All engines of this life."""
    _pool: EnginePool | None = None
    _trainer: SimulatedTrainer | SimulatedRanks = field(init=False)
    _chosen_ranks: Callable[[], int] = field(init=False)
    """Chooses the number of ranks of a life."""
    _environments: dict[str, SimulatedEnvironment] = field(init=False)
    _options: dict[str, Any] = field(init=False)
    _endpoint: SimulatedEndpoint = field(init=False)
    _validation: dict[str, Any] = field(init=False)
    """The section of the configuration."""
    _measured: int = field(init=False, default=-1)
    """The newest version that was validated."""
    _members: int = field(init=False)
    """Number of engines in a pool; 0 is one engine without a pool."""
    _learns: bool = field(init=False)
    """Whether the sampler chooses prompts."""
    _shares: Any = field(init=False)
    """The sampler's option."""
    _cuts: bool = field(init=False)
    """Whether a token limit cuts off completions."""
    _remembers: bool = field(init=False)
    """Whether the sampler learns from rewards."""
    _mode: str = field(init=False)
    _warmth: float = 1.0
    """Multiplies the temperature at which engines sample in this life."""
    _prompts: dict[str, list[Prompt]] = field(init=False)
    _poisoned: set[str] = field(init=False)

    def __attrs_post_init__(self) -> None:
        JITTER.seed(self.seed)
        rng = random.Random(f"run/{self.seed}")
        self._options = {
            "save_every": rng.choice([1, 2, 3, 5]),
            "in_flight_updates": rng.random() < 0.8,
        }
        self._validation = {
            "every": rng.choice([0, 3]),
            "at_start": rng.random() < 0.7,
            "sets": {HELD_OUT_SET: {"every": rng.choice([0, 2, 4])}} if rng.random() < 0.5 else {},
        }
        self._dynamic = rng.random() < 0.3
        members = rng.choice([0, 0, 0, 2, 3])
        self._members = members if self.members is None else self.members
        self._remembers = rng.random() < 0.3
        self._mode = rng.choice(["batched", "pipelined"])
        self._prompts = {
            task: _Prompts(
                Prompt(messages=f"{task} {i}", id=str(i), environment=task)
                for i in range(rng.randint(20, 60))
            )
            for task in TASKS
        }
        self._draw_rules(random.Random(f"rules/{self.seed}"))
        ranks = random.Random(f"ranks/{self.seed}")
        several = ranks.random() < 0.3
        self._chosen_ranks = lambda: self.ranks or (ranks.choice([1, 2, 3]) if several else 1)
        self._poisoned = {str(i) for i in range(60) if rng.random() < self.faults.poisoned}

    def _draw_rules(self, rng: random.Random) -> None:
        """Draw which groups are filtered, how rewards are shaped, and how prompts are chosen."""
        self._learns = rng.random() < 0.25
        self._shares = rng.choice(["random", "random", "drawn", "trained"])
        self._cuts = rng.random() < 0.5
        agents = random.Random(f"agents/{self.seed}")
        drawn = agents.choice([(), (), (), (), ("long", "ranked")])
        playing = drawn if self.agents is None else self.agents
        self.truth = Truth(
            Rules(
                turns=TASKS,
                agents={task: agents.randint(3, 8) for task in playing},
                compared=COMPARED,
                truncated=rng.choice(["train", "mask", "unscored"]),
                truncated_factor=rng.choice([1.0, 0.5]),
                token_price=rng.choice([0.0, 0.01]),
                highest_pass_rate=rng.choice([1.0, 1.0, 0.5]),
                shortest=rng.choice([0.0, 0.0, 3.5]),
            )
        )
        self.settle_rules()

    def settle_rules(self) -> None:
        """Tell the truth about what the rules depend on."""
        weighs = not self._remembers or self._learns
        exact = self._shares == "trained" and self.policy == "in_order" and weighs
        self.truth.rules = evolve(
            self.truth.rules, differ=self._dynamic, quota=self._quota if exact else None
        )

    def _quota(self, step: int) -> dict[str, int]:
        """Return the number of groups of each task in a step, by largest remainders since the first step."""
        weights = {task: Fraction(WEIGHTS.get(task, 1)) for task in sorted(TASKS)}
        owed, counts = dict.fromkeys(weights, Fraction(0)), dict.fromkeys(weights, 0)
        for _ in range(step + 1):
            counts = dict.fromkeys(weights, 0)
            for task, weight in weights.items():
                owed[task] += self.prompts_per_step * weight / sum(weights.values())
            for _ in range(self.prompts_per_step):
                most = max(owed, key=lambda task: owed[task])
                owed[most] -= 1
                counts[most] += 1
        return counts

    # ------------------------------------------------------------------------------ all lives

    def run(self) -> Outcome:
        lives: list[str] = []
        happened: set[str] = set()
        for number in range(1, self.most_lives + 1):
            faults = self.faults if number < self.most_lives else NONE
            self._dice = Dice(f"life/{self.seed}/{number}", faults)
            lives.append(self._live(number))
            happened |= self._dice.happened
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
            weights=self._weights,
            happened=frozenset(happened),
        )

    @property
    def _weights(self) -> str:
        trainer = self._trainer
        return (trainer.together if isinstance(trainer, SimulatedRanks) else trainer).digest.hex()

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
        self._draw_temperature()
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
                validated=self._measured,
            )
        )
        dice = self._dice.random
        kill_at = dice.randrange(1500) if self._dice.happens("kill") else -1
        stop_at = dice.uniform(0, 40) if self._dice.happens("stop") else None
        again_at = dice.uniform(0, 5) if self._dice.happens("second_stop") else None
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

        ended = self._until_its_end(self._story(pipeline, stop_at, again_at), f"{self.seed}/{number}", watch)
        if isinstance(self._trainer, SimulatedRanks):
            self._trainer.forget()
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
        except asyncio.CancelledError:
            return "stopped at once"
        except clock.Deadlock as deadlock:
            self._broken(f"deadlock: {deadlock}")
            return "deadlock"
        except GrpoError as error:
            given_up = self._pool is not None and statistics(self._pool).given_up
            if not (self._dice.fatal or self._dice.doubtful or given_up):
                self._broken(f"failed without reason: {type(error).__name__}: {error}")
            return f"failed: {type(error).__name__}: {error}".split("\n")[0]
        except Exception as error:
            self._broken(f"an error that is none of ours: {type(error).__name__}: {error}")
            return f"failed: {type(error).__name__}"

    async def _story(self, pipeline: Pipeline, stop_at: float | None, again_at: float | None) -> str:
        loop = asyncio.get_running_loop()
        main = asyncio.current_task()
        assert main is not None
        if stop_at is not None:
            loop.call_later(stop_at, pipeline.stop)
            if again_at is not None:
                loop.call_later(stop_at + again_at, main.cancel)
        with reported_to(lambda incident: self._tell(f"survived: {incident.component}: {incident.message}")):
            self._start_engines(pipeline)
            try:
                return await pipeline.run()
            finally:
                self.seconds += loop.time()
                await self._close(pipeline)

    async def _close(self, pipeline: Pipeline) -> None:
        left = sum(engine.running(canaries=self._pool is None) for engine in self._engines)
        await pipeline.engine.aclose()
        left += sum(engine.running(canaries=True) for engine in self._engines)
        await pipeline.trainer.aclose()
        if left and not self._dead:
            self._broken(f"the pipeline has ended, and {left} calls of engines go on")
        for environment in pipeline.playing.environments.values():
            with contextlib.suppress(RuntimeError):
                await environment.aclose()  # type: ignore[attr-defined]

    def _start_engines(self, pipeline: Pipeline) -> None:
        """Make the engine, or the pool, whose supervisors need a running loop."""
        nodes: list[list[SimulatedEngine]] = [[], []]

        def make(number: int) -> SimulatedEngine:
            again = len(self._engines) >= self._members
            engine = SimulatedEngine(
                self._dice,
                self._memory,
                self.truth,
                self._tell,
                node=nodes[number % 2] if self._members else None,
                warmth=self._warmth,
                cuts=self._cuts,
                starts=RESTART if again and self._members else 0.0,
            )
            self._engines.append(engine)
            return engine

        self._pool = None
        if not self._members:
            pipeline.engine = make(0)
            return
        self._pool = pipeline.engine = EnginePool(
            make, self._members, deadline=ENGINE_DEADLINE, hold=self._memory.hold
        )

    def _settle(self, pipeline: Pipeline, ended: str) -> None:
        """A life that ended by itself leaves everything in order."""
        names = {"finished": "finished", "interrupted": "interrupted", "stopped at once": "interrupted"}
        reason = names.get(ended, "failed")
        self._emit(RunEnded(step=pipeline.buffer.step, reason=reason))
        for task, environment in self._environments.items():
            if environment.sessions:
                self._broken(f"{ended}, and {len(environment.sessions)} sessions of {task} are open")
        if self._endpoint.sessions:
            self._broken(f"{ended}, and {len(self._endpoint.sessions)} sessions of agents are open")
        if ended == "finished":
            self.truth.ledger.finished(pipeline.buffer.step)
        if ended not in ("finished", "interrupted"):
            return
        dropped = DROPPED if ended == "interrupted" else ()
        if fatal := [fault for fault in self._dice.fatal if fault not in dropped]:
            self._broken(f"went on after {fatal}")
        found = checkpoint.newest(self._checkpoints)
        if found is None or found.step != pipeline.buffer.step:
            self._broken(f"{ended} at step {pipeline.buffer.step}, but the newest checkpoint is {found}")

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
        """Damage the newest checkpoint that holds, if there is another to continue from."""
        named = [directory for _, directory in checkpoint.complete_names(self._checkpoints)]
        if len(named) < 2 or not self._dice.happens("rot"):
            return
        whole = [directory for directory in named if checkpoint.fault(directory) is None]
        if len(whole) > 1:
            assert self._disk is not None
            self._disk.rot(whole[-1] / "pipeline.json", self._dice.random)
            self._tell(f"a byte of {whole[-1].name} has changed")

    # ------------------------------------------------------------------------------ the parts

    def _assemble(self) -> tuple[Pipeline, WeightedTaskSampler, checkpoint.Found | None]:
        found = checkpoint.newest(self._checkpoints)
        self._memory, self._engines = Memory(), []
        self._disk = disk = SimulatedDisk(self.root, self._disk, self._dice, self._tell, self._die)
        resume_from = found.directory if found else None
        alone = SimulatedTrainer(self._dice, self._memory, self.truth, disk, resume_from)
        ranks = self._chosen_ranks()
        self._trainer = trainer = alone if ranks == 1 else SimulatedRanks(ranks, alone, self._tell)
        loaders = {task: IndexedLoader(task, self._prompts[task], seed=self.seed) for task in TASKS}
        sampler = self._sampler()
        stream = PromptStream(sampler=sampler, loaders=loaders, name=sampler.name)
        buffer = _Watched(
            prompts_per_step=self.prompts_per_step,
            max_staleness=self.max_staleness,
            num_steps=self.steps,
            policy=self.policy,
            max_retries=MAX_RETRIES,
        )
        if found is not None:
            checkpoint.restore(found.directory, buffer, loaders, stream)
        self._measured = -1 if found is None else checkpoint.read_pipeline(found.directory).validated
        self.truth.carried = {slot.id for slot, _ in buffer.state_dict()["ready"]}

        async def save(step: int, failure: Failure | None) -> Written:
            return await checkpoint.begin(
                self._checkpoints,
                step=step,
                pipeline={
                    **checkpoint.snapshot(buffer, stream, failure=failure),
                    "validated": self._measured,
                },
                loaders={task: loader.state_dict() for task, loader in loaders.items()},
                save_trainer=trainer.save,
                keep=2 if failure is None else None,
                disk=disk,
            )

        rules = self.truth.rules
        outstanding = (self.max_staleness + 1) * self.prompts_per_step * self.group_size
        lost = LostBudget(outstanding * (MAX_RETRIES + 1))

        def observe_attempt(task: str, rollouts: Sequence[Rollout], attempts: int) -> None:
            if task in rules.agents:
                self.truth.ledger.ended(buffer.step, rollouts)
            for rollout in rollouts:
                lost.observe(rollout)

        renderer = SimulatedRenderer()
        pipeline = Pipeline(
            buffer=buffer,
            prompts=stream,
            engine=_NO_ENGINE,
            playing=Playing(
                environments=self._batched_environments(),
                renderer=renderer,
                sampling=SamplingParams(temperature=TEMPERATURE, max_tokens=8, truncated=rules.truncated),
                group_size=self.group_size,
                seed=self.seed,
            ),
            learning=Learning(
                advantages=group_advantages, shaping=self._shaping(), dynamic=self._filtering()
            ),
            trainer=trainer,
            checks=Checks(
                observe_attempt=observe_attempt,
                canary=[renderer.prompt_ids(own[0].messages) for own in self._prompts.values()][:2],
                limits=self._limits,
                watch=[trainer.watch] if ranks > 1 else [],
            ),
            schedule=Schedule(
                rollout_deadline=90.0,
                stall=3600.0,
                sync_deadline=2 * ENGINE_DEADLINE + making.SYNC_GRACE,
                validations=list(self._intervals().values()),
                **self._options,
            ),
            emit=self._emit,
            validate=lambda version: self._validate(version, pipeline),
            validate_first=self._measured < buffer.step,
            save=save,
        )
        return pipeline, sampler, found

    @property
    def _limits(self) -> dict[str, Thresholds]:
        """None in the last life: groups of an engine at a wrong temperature may be left in a checkpoint."""
        last = self._dice.faults == NONE and self.faults != NONE
        return {} if last else {"logprob_diff_mean": Thresholds(soft=0.1, hard=DIFFERENCE)}

    def _draw_temperature(self) -> None:
        self._warmth = 2.0 if self._dice.happens("wrong_temperature") else 1.0

    def _sampler(self) -> WeightedTaskSampler:
        given: dict[str, Any] = {"weights": WEIGHTS, "seed": self.seed, "shares": self._shares}
        if self._learns:
            return LearnablePrompts(candidates=3, half_life=4.0, success=0.5, **given)
        if self._remembers:
            return Curriculum(window=6, known_after=2, success=0.5, **given)
        return Mix(**given)

    def _shaping(self) -> Shaping | None:
        rules = self.truth.rules
        if rules.truncated_factor == 1.0 and not rules.token_price:
            return None
        keys = ShapingConfig(truncated_factor=rules.truncated_factor, token_price=rules.token_price)
        return Shaping(keys)

    def _filters(self) -> dict[str, dict[str, float]]:
        """Return the section of the configuration."""
        rules = self.truth.rules
        rate = {"pass_rate": {"high": rules.highest_pass_rate}} if rules.highest_pass_rate < 1.0 else {}
        return rate | ({"mean_length": {"shortest": rules.shortest}} if rules.shortest else {})

    def _filtering(self) -> DynamicSampling | None:
        chosen = {
            name: functools.partial(_FILTERS[name], **options) for name, options in self._filters().items()
        }
        if not chosen and not self._dynamic:
            return None
        return DynamicSampling(
            tolerance=0.0 if self._dynamic else None, filters=chosen, max_extra_groups=1000
        )

    def _batched_environments(self) -> dict[str, EnvironmentClient]:
        config = EnvironmentConfig(max_batch=16, max_wait=0.01)
        agents = self.truth.rules.agents
        self._endpoint = SimulatedEndpoint(self.truth.ledger)
        self._environments = {
            task: SimulatedEnvironment(
                task,
                self._dice,
                self.truth,
                self._tell,
                max_turns=agents.get(task, turns),
                needs_group=COMPARED[task],
                poisoned=self._poisoned,
                group_size=self.group_size,
                endpoint=self._endpoint if task in agents else None,
            )
            for task, turns in TASKS.items()
        }
        batched = {task: _Pool([each], config, truth=self.truth) for task, each in self._environments.items()}
        for task in agents:
            batched[task].player = self._endpoint
            batched[task]._places = Places(1, AGENTS_AT_ONCE)
        return batched

    async def _validate(self, version: int, pipeline: Pipeline) -> Results:
        """Measure a version with held-out prompts of the tasks and of a set, through the real runner."""
        environments = {**pipeline.playing.environments, HELD_OUT_SET: pipeline.playing.environments["short"]}
        parts = [
            HeldOut(
                name=name,
                config=ValidationConfig(
                    name="simulated", every=interval.every, at_start=interval.at_start, deadline=300.0
                ),
                prompts={
                    task: [
                        Prompt(messages=f"{task} held out", id=f"{HELD_OUT} {i}", environment=task)
                        for i in range(2 if task == "short" else 1)
                    ]
                    for task in ([name] if name else TASKS)
                },
                environments=environments,
            )
            for name, interval in self._intervals().items()
        ]
        shared = Context(
            version=0,
            prompts={},
            engine=pipeline.engine,
            environments=environments,
            renderer=pipeline.playing.renderer,
            sampling=pipeline.playing.sampling,
            retries=MAX_RETRIES,
            seed=self.seed,
        )
        strategies = {part.name: self._strategy() for part in parts}
        validation = Validation(parts=parts, strategies=strategies, shared=shared, last=self.steps)
        results = await validation(version)
        self._measured = version
        return results

    def _intervals(self) -> dict[str, Interval]:
        """Return when the tasks (the empty name) and each validation set are measured."""
        section = self._validation
        own = {name: one["every"] for name, one in section["sets"].items()}
        return {
            name: Interval(every, section["at_start"])
            for name, every in {"": section["every"], **own}.items()
        }

    def _strategy(self) -> ValidationStrategy:
        return SimulatedValidation(self._dice, self.truth, self._tell, self._mode)

    def _config(self) -> dict[str, Any]:
        return {
            "trainer": {"prompts_per_step": self.prompts_per_step, "steps": self.steps},
            "pipeline": {"max_staleness": self.max_staleness, "policy": self.policy},
            "rollout": {
                "max_retries": MAX_RETRIES,
                "group_size": self.group_size,
                "truncated": self.truth.rules.truncated,
            },
            "filters": self._filters(),
            "sampler": {"name": "mix"},
            "dynamic_sampling": {"enabled": self._dynamic},
            "validation": self._validation,
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
            case GroupsReturned():
                self.truth.returned(event.slots)
            case GroupFiltered():
                self.truth.filtered(event)
            case PromptSkipped():
                self.truth.ledger.settled(event.slot)
            case StepEnded():
                self.truth.metrics(event.step, event.metrics)
            case Saving():
                self.truth.saving(event.step)
            case Synced():
                self._check_synced(event.step)

    def _check_synced(self, version: int) -> None:
        """Every engine that gets requests holds this version."""
        if self._pool is None:
            held = [engine.version for engine in self._engines]
        else:
            held = [getattr(member.engine, "version", None) for member in self._pool._serving()]
        if not all(each == version for each in held):
            self._broken(f"version {version} is synced, engines hold {held}")

    def _tell(self, line: str) -> None:
        try:
            at = asyncio.get_running_loop().time()
        except RuntimeError:
            at = 0.0
        line = line.replace(str(self.root), "")
        if "are free now" in line:
            line = re.sub(r"[\d,]+ are free now", "some are free now", line)
        self.story.append(f"{at:9.3f}  {line}")
        self._hash.update(self.story[-1].encode())

    def _violated(self) -> bool:
        return bool(self.laws.violations or self.truth.violations)

    def _broken(self, what: str) -> None:
        self.truth.violations.append(Violation("story", 0, what))


_FILTERS: dict[str, Any] = {"pass_rate": filters.pass_rate, "mean_length": filters.mean_length}

_NO_ENGINE: Any = None
"""Stands for the engine until the loop runs."""


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
    members: int | None = None,
    agents: Sequence[str] | None = None,
    ranks: int | None = None,
) -> Outcome:
    """Simulate a run of ``steps * prompts_per_step`` prompts, in groups of ``group_size``, to its end.

    It has so many ``lives`` at most, the last of them without faults, and ``members`` engines in a pool: 0 is
    one engine without a pool, None lets the seed decide.  ``agents`` names the tasks that agents play.  The
    trainer has ``ranks`` processes in every life.
    """
    memory = Path("/dev/shm")
    scratch = tempfile.mkdtemp(prefix="grpo-core-", dir=memory if memory.is_dir() else None)
    try:
        return Simulation(
            seed,
            policy,
            max_staleness,
            faults,
            steps,
            prompts_per_step,
            group_size,
            Path(scratch),
            lives,
            members,
            agents,
            ranks,
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
    parser.add_argument("--agents", nargs="*", choices=TASKS, help="tasks of agents; default: by the seed")
    parser.add_argument("--ranks", type=int, help="processes of the trainer; default: by the seed")
    parser.add_argument("--no-faults", action="store_true")
    parser.add_argument("--quiet", action="store_true", help="only the feedback")
    given = parser.parse_args(arguments)
    spare_the_collector()
    for seed in range(given.seed, given.seed + given.seeds):
        policy: Policy = given.policy or ("deadline", "in_order")[seed % 2]
        max_staleness = seed // 2 % 5 if given.max_staleness is None else given.max_staleness
        outcome = simulate(
            seed,
            policy=policy,
            max_staleness=max_staleness,
            faults=NONE if given.no_faults else Faults(),
            agents=given.agents,
            ranks=given.ranks,
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
