"""Validation while training continues or waits: a fixed version, without effects on training."""

from __future__ import annotations

import asyncio
import itertools
from hashlib import blake2b

import pytest
from attrs import evolve
from simulation.faults import NONE, Faults
from simulation.runs import Simulation

from grpo_core.contracts.errors import EngineError, PluginError, WeightSyncError
from grpo_core.contracts.events import Dispatched, GroupFinished, GroupsReady, StepEnded, Synced, Validated
from grpo_core.contracts.records import Prompt, SampleRequest
from grpo_core.loop.agreement import Tolerance
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.laws import Laws
from grpo_core.loop.pipeline import Checks, Learning, Pipeline, Playing, Schedule
from grpo_core.loop.rollout import SamplingParams
from grpo_core.loop.rows import group as group_advantages
from grpo_core.loop.versions import Interval
from grpo_core.reporting.files import plain
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer, FakeTrainer, run
from grpo_core.testing.fakes import FakePrompts
from grpo_core.validation.runner import Context, DedicatedValidator, WeightsTrackingEngine, run_strategy
from grpo_core.validation.strategies import Batched, Pipelined
from grpo_plugin_algorithms.strategies import PassAtK

SAMPLING = SamplingParams(temperature=1.0, max_tokens=8)
STEPS = 12


def slowly(rng):
    """Several steps."""
    return 2.5 + rng.random() / 2


class Watched(FakeTrainer):
    """Knows whether it is in a step."""

    stepping = False

    async def step(self, batch):
        self.stepping = True
        try:
            return await super().step(batch)
        finally:
            self.stepping = False


class Training:
    """A pipeline of fakes that validates each fourth version, with a strategy, on one engine or another."""

    def __init__(
        self,
        strategy=None,
        *,
        own=None,
        engine=None,
        policy="deadline",
        every=4,
        step_seconds=1.0,
        **schedule,
    ):
        self.events, self.seen = [], []
        self.engine, self.trainer = engine or FakeEngine(), Watched(seconds=step_seconds)
        self.environment = FakeEnvironment()
        self.measuring = own or self.engine
        self.strategy = strategy
        validate, engine, watch = self.measure, self.engine, ()
        if own is not None:
            engine = WeightsTrackingEngine(self.engine)
            validate = DedicatedValidator(
                measure=self.measure,
                engine=own,
                trained=engine,
                emit=self.emit,
                last=STEPS,
                pauses=schedule.get("pause_to_validate", False),
                deadline=100.0,
                canary_tolerance=Tolerance(1e-3),
            )
            watch = (validate.watch,)
        numbers = itertools.count()
        buffer = Buffer(prompts_per_step=4, max_staleness=2, num_steps=STEPS, policy=policy, max_retries=3)
        self.pipeline = Pipeline(
            buffer=buffer,
            prompts=FakePrompts(lambda request: self.draw(request, numbers)),
            engine=engine,
            playing=Playing(
                environments={"task": self.environment},
                renderer=FakeRenderer(),
                sampling=SAMPLING,
                group_size=4,
            ),
            learning=Learning(advantages=group_advantages),
            trainer=self.trainer,
            checks=Checks(watch=watch),
            emit=self.emit,
            schedule=Schedule(validations=[Interval(every)] if strategy else (), stall=3600.0, **schedule),
            validate=validate,
        )

    @staticmethod
    def draw(request: SampleRequest, numbers):
        return [
            Prompt(messages=f"{n}", id=str(n), environment="task")
            for n in itertools.islice(numbers, request.expected_prompts)
        ]

    def emit(self, event):
        self.events.append((asyncio.get_running_loop().time(), event))

    async def measure(self, version):
        context = Context(
            version=version,
            prompts={"task": [Prompt(messages=f"v{i}", id=f"v{i}", environment="task") for i in range(16)]},
            engine=self.measuring,
            environments={"task": FakeEnvironment()},
            renderer=FakeRenderer(),
            sampling=SAMPLING,
        )
        begun = len(self.events)
        self.seen.append((self.engine.running, self.trainer.stepping))
        results = await run_strategy("tested", self.strategy, context)
        meanwhile = {type(event) for _, event in self.events[begun:]}
        self.seen[-1] = (*self.seen[-1], meanwhile)
        return results

    def __call__(self, seed=None):
        self.result = run(self.pipeline.run(), seed=seed)
        return self

    def of(self, kind):
        return [event for _, event in self.events if isinstance(event, kind)]

    def trace(self):
        """All that happened to training, with its times."""
        return [(at, plain(event)) for at, event in self.events if not isinstance(event, Validated)]


# ---------------------------------------------------------------------------------- on training's engine


def test_training_continues_meanwhile_on_one_fixed_version():
    done = Training(Pipelined())()
    assert [event.version for event in done.of(Validated)] == [0, 4, 8, 12]
    in_between = [meanwhile for _, _, meanwhile in done.seen[1:-1]]
    assert any(GroupFinished in meanwhile for meanwhile in in_between), "groups are generated meanwhile"
    assert not any(Synced in meanwhile for meanwhile in in_between), "the weights stay"


@pytest.mark.parametrize("policy", ["deadline", "in_order"])
@pytest.mark.parametrize("in_flight_updates", [True, False])
@pytest.mark.parametrize("step_seconds", [1.0, 60.0])
def test_training_pauses_during_validation_if_configured(policy, in_flight_updates, step_seconds):
    done = Training(
        Batched(),
        pause_to_validate=True,
        policy=policy,
        in_flight_updates=in_flight_updates,
        step_seconds=step_seconds,
    )(seed=3)  # fmt: skip
    assert done.result == "finished"
    assert [event.version for event in done.of(Validated)] == [0, 4, 8, 12]
    assert done.seen == [(0, False, set())] * 4, "nothing is generated, trained or told of meanwhile"
    assert len(done.of(GroupsReady)) == STEPS


def test_no_group_begins_again_while_validation_waits_for_the_running_ones():
    def often(request):
        of_training = request.prompt_ids[0] != ord("v")
        return EngineError("again") if of_training and request.seed % 10 == 0 else None

    done = Training(Batched(), pause_to_validate=True, engine=FakeEngine(fault=often))()
    for version in (4, 8):
        (begin,) = [at for at, e in done.events if isinstance(e, Synced) and e.step == version]
        (end,) = [at for at, e in done.events if isinstance(e, Validated) and e.version == version]
        assert not [at for at, e in done.events if isinstance(e, Dispatched) and begin < at < end]
    assert any(slot.attempts for event in done.of(Dispatched) for slot in event.slots)


def test_a_failing_validation_lets_a_paused_run_end():
    class Fails:
        async def validate(self, context):
            if context.version:
                raise EngineError("no memory")
            return {"task": {"accuracy": 0.0}}

    with pytest.raises(EngineError, match="no memory"):
        Training(Fails(), pause_to_validate=True)()


# ---------------------------------------------------------------------------------- on one of its own


@pytest.mark.long
def test_training_does_not_wait_for_a_separate_engine():
    """Each validation takes several steps; training is the same, at the same times."""
    own = FakeEngine(latency=slowly, update_seconds=0.0)
    for policy in ("deadline", "in_order"):
        without = Training(policy=policy)()
        with_ = Training(PassAtK(k=2), own=own, policy=policy, every=4)()
        assert [event.version for event in with_.of(Validated)] == [0, 4, 8, 12]
        assert with_.trace() == without.trace()
        assert with_.trainer.state == without.trainer.state
        assert all(StepEnded in meanwhile for _, _, meanwhile in with_.seen[1:-1])


def test_its_versions_are_measured_one_after_the_other_and_all_of_them():
    own = FakeEngine(latency=slowly)
    done = Training(Pipelined(), own=own, every=1)()
    assert [event.version for event in done.of(Validated)] == list(range(STEPS + 1))
    assert own.version == STEPS
    assert done.result == "finished"


def test_training_pauses_for_a_dedicated_engine_if_configured():
    done = Training(Batched(), own=FakeEngine(latency=slowly), pause_to_validate=True)()
    assert [event.version for event in done.of(Validated)] == [0, 4, 8, 12]
    assert done.seen == [(0, False, set())] * 4


def test_an_error_of_the_dedicated_engine_ends_the_run():
    class Wrong:
        async def validate(self, context):
            return {"task": {"accuracy": "high"}} if context.version == 4 else {"task": {"accuracy": 1.0}}

    training = Training(Wrong(), own=FakeEngine())
    with pytest.raises(PluginError, match="returned 'high'"):
        training()
    assert [event.version for event in training.of(Validated)] == [0]
    assert not training.engine.running


def test_a_separate_engine_that_does_not_take_the_weights_ends_the_run():
    with pytest.raises(WeightSyncError, match=r"version 0 .* within 100 s \(validation.engine.deadline\)"):
        Training(Batched(), own=FakeEngine(update_seconds=1000.0))()


def test_a_run_that_is_stopped_does_not_wait_for_its_results():
    training = Training(Batched(), own=FakeEngine(latency=lambda rng: 1e5), every=STEPS)

    async def story():
        running = asyncio.create_task(training.pipeline.run())
        await asyncio.sleep(8.0)
        training.pipeline.stop()
        return await running, asyncio.get_running_loop().time()

    reason, seconds = run(story())
    assert reason == "interrupted"
    assert seconds < 60
    assert not training.of(Validated)


# ---------------------------------------------------------------------------------- in the simulated world


class Validating(Simulation):
    """Validates with a strategy of the core, or not at all."""

    strategy = None
    every = 3

    def told(self):
        """The simulation with everything that training may depend on fixed."""
        self._validation = {"every": self.every if self.strategy else 0, "at_start": True, "sets": {}}
        self._options["in_flight_updates"] = False
        self._dynamic = self._learns = False  # groups that are filtered make room in the order they end in
        self.truth.rules = evolve(self.truth.rules, highest_pass_rate=1.0, shortest=0.0)
        self._shares = "random"
        self._remembers = False  # a curriculum draws by what has been observed until then
        self.settle_rules()
        self.trained, self.validated = blake2b(), []
        return self

    def _emit(self, event):
        if isinstance(event, GroupsReady | StepEnded):
            record = plain(event)
            record.pop("metrics", None)  # times and lengths of queues
            self.trained.update(repr(record).encode())
        if isinstance(event, Validated):
            self.validated.append(event.version)
        super()._emit(event)

    def _strategy(self):
        return self.strategy


def simulated(strategy, seed, tmp_path, *, faults=NONE, max_staleness=1, policy="in_order"):
    name = f"{type(strategy).__name__}-{seed}-{max_staleness}-{policy}"
    simulation = Validating(seed, policy, max_staleness, faults, 6, 4, 3, tmp_path / name)
    simulation.root.mkdir()
    simulation.strategy = strategy
    outcome = simulation.told().run()
    assert outcome.violations == ()
    return simulation, outcome


@pytest.mark.long
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_training_has_the_same_trace_with_and_without_validation(max_staleness, tmp_path):
    for seed in range(2):
        without, _ = simulated(None, seed, tmp_path, max_staleness=max_staleness)
        for strategy in (Batched(), PassAtK(k=2, mode="pipelined")):
            with_, outcome = simulated(strategy, seed, tmp_path, max_staleness=max_staleness)
            assert outcome.lives == ("finished",)
            assert with_.validated == [0, 3, 6]
            assert with_.trained.hexdigest() == without.trained.hexdigest()


@pytest.mark.long
def test_the_laws_hold_with_validation_whatever_fails(tmp_path):
    for seed in range(6):
        policy = ("deadline", "in_order")[seed % 2]
        simulated(Pipelined(n=2), seed, tmp_path, faults=Faults(), max_staleness=seed % 4, policy=policy)


# ---------------------------------------------------------------------------------- as the laws see it


def broken_laws(versions, *, engine):
    """The complaints of ``verify`` about a run of two steps that measured these versions after them."""
    config = {
        "trainer": {"prompts_per_step": 1, "steps": 2},
        "pipeline": {"max_staleness": 0, "policy": "deadline"},
        "rollout": {"max_retries": 0, "group_size": 2},
        "sampler": {"name": "mix"},
        "validation": {"engine": {"name": "local"}} if engine else {},
    }
    laws = Laws()
    laws.observe({"event": "RunStarted", "step": 0, "resumed": False, "buffer": {}, "config": config})
    laws._now.step = laws._now.version = 2
    for version in versions:
        laws.observe({"event": "Validated", "step": version, "version": version, "results": {}})
    return [violation.law for violation in laws.violations]


def test_a_separate_engine_measures_versions_in_order_and_the_training_engine_the_one_it_holds():
    assert broken_laws([0, 2], engine=True) == []
    assert broken_laws([2, 0], engine=True) == ["validation"]
    assert broken_laws([3], engine=True) == ["validation"]
    assert broken_laws([0, 2], engine=False) == ["validation"]
    assert broken_laws([2], engine=False) == []
