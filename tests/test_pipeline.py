"""The real pipeline under the virtual clock, with fakes that keep the contracts."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from pathlib import Path

import pytest
from attrs import evolve

from grpo_core.contracts.errors import (
    CheckpointError,
    DeadlineExceeded,
    EngineError,
    PluginError,
    TrainerError,
    WeightSyncError,
)
from grpo_core.contracts.events import (
    Dispatched,
    GroupFiltered,
    GroupsReady,
    PromptSkipped,
    Saved,
    Saving,
    StepEnded,
    Synced,
    Validated,
    WarningRaised,
)
from grpo_core.contracts.incidents import reported_to
from grpo_core.contracts.records import Completion, Feedback, GenerationRequest, Judgement
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.dynamic import DynamicSampling
from grpo_core.loop.pipeline import Checks, Learning, Pipeline, Playing, Schedule
from grpo_core.loop.rollout import SamplingParams
from grpo_core.loop.rows import group as group_advantages
from grpo_core.loop.versions import Interval
from grpo_core.processes.aio import FairSemaphore
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer, FakeTrainer, prompts, run
from grpo_core.testing.fakes import FakePrompts
from grpo_plugin_algorithms.shaping import Shaping, ShapingConfig


class Stream:
    """A loader whose n-th prompt is prompt n, so that nothing lost or doubled stays unseen."""

    def __init__(self, size=10_000):
        self.prompts, self.position = prompts(size), 0

    def take(self, n):
        self.position += n
        return self.prompts[self.position - n : self.position]

    def __len__(self):
        return len(self.prompts)


class Run:
    """A pipeline of fakes and what happened in it."""

    def __init__(self, *, steps=12, prompts_per_step=4, max_staleness=1, policy="deadline", **changes):
        self.events = []
        self.requests = []
        self.stream = Stream()
        self.engine = changes.pop("engine", None) or FakeEngine()
        self.trainer = changes.pop("trainer", None) or FakeTrainer()
        self.environment = changes.pop("environment", None) or FakeEnvironment()
        self.buffer = Buffer(
            prompts_per_step=prompts_per_step,
            max_staleness=max_staleness,
            num_steps=steps,
            policy=policy,
            max_retries=changes.pop("max_retries", 3),
        )

        def some(*names):
            return {name: changes.pop(name) for name in names if name in changes}

        self.pipeline = Pipeline(
            buffer=self.buffer,
            prompts=FakePrompts(self.draw),
            engine=self.engine,
            playing=Playing(
                environments={"task": self.environment},
                renderer=FakeRenderer(),
                sampling=SamplingParams(temperature=1.0, max_tokens=8),
                group_size=changes.pop("group_size", 4),
                **some("places", "seed"),
            ),
            learning=Learning(
                advantages=changes.pop("advantages", group_advantages),
                **some("all_rows", "shaping", "dynamic", "hints", "needs_hints"),
            ),
            checks=Checks(**some("observe_attempt", "canary", "tolerance", "limits", "watch")),
            trainer=self.trainer,
            emit=self.events.append,
            schedule=Schedule(**{"rollout_deadline": 60.0, "stall": 3600.0, **changes.pop("schedule", {})}),
            **changes,
        )

    def draw(self, request):
        self.requests.append(request)
        return self.stream.take(request.expected_prompts)

    def __call__(self, seed=None):
        self.result = run(self.pipeline.run(), seed=seed)
        return self

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def trained(self):
        return [group.prompt.id for event in self.of(GroupsReady) for group in event.groups]


# ---------------------------------------------------------------------------------- the way of the data


class OneGpu:
    """A GPU whose memory one process has at a time."""

    def __init__(self, holder):
        self.holder, self.turns = holder, []

    def give(self, given, taken):
        assert self.holder == given, f"{taken} takes what {self.holder} holds"
        self.holder = taken
        self.turns.append(taken)


class InTurn(FakeEngine):
    """An engine that takes a while to give its memory back, and computes nothing until it has it again."""

    def __init__(self, gpu, **how):
        super().__init__(**how)
        self.gpu, self.awake = gpu, asyncio.Event()

    async def rest(self):
        self.awake.clear()
        await asyncio.sleep(0.5)
        self.gpu.give("engine", "nobody")

    async def wake(self):
        await asyncio.sleep(0.2)
        self.gpu.give("nobody", "engine")
        self.awake.set()

    async def _one(self, request):
        while True:
            answer = await super()._one(request)
            if self.gpu.holder == "engine":
                return answer
            await self.awake.wait()  # and what it had computed of this request is lost

    async def update_weights(self, weights):
        assert self.gpu.holder == "engine"
        await super().update_weights(weights)
        assert self.gpu.holder == "engine"
        self.awake.set()


class StepsInTurn(FakeTrainer):
    gpu: OneGpu

    async def step(self, batch):
        self.gpu.give("nobody", "trainer")
        result = await super().step(batch)
        assert self.gpu.holder == "trainer"
        return result

    async def publish(self, canary=()):
        await asyncio.sleep(0.1)
        if self.version:
            self.gpu.give("trainer", "nobody")
        return await super().publish(canary)


@pytest.mark.parametrize(("policy", "max_staleness"), [("deadline", 0), ("deadline", 2), ("in_order", 1)])
@pytest.mark.parametrize("validates", [0, 1], ids=["", "validated"])
@pytest.mark.parametrize("seed", range(5))
def test_an_engine_on_the_trainers_gpu_rests_while_a_step_is_computed(policy, max_staleness, validates, seed):
    """Neither begins before the other has given the memory back; running requests wait, and none is lost."""
    gpu = OneGpu("engine")
    trainer = StepsInTurn(seconds=2.0)
    trainer.gpu = gpu
    engine = InTurn(gpu)

    async def validate(version):
        await engine.generate([GenerationRequest(prompt_ids=(1,), max_tokens=4)])
        return {}

    ran = Run(
        steps=6,
        max_staleness=max_staleness,
        policy=policy,
        engine=engine,
        trainer=trainer,
        resting=[engine],
        validate=validate if validates else None,
        schedule={"validations": [Interval(2)]},
    )(seed)
    assert ran.result == "finished"
    assert gpu.turns == ["nobody", "trainer", "nobody", "engine"] * 6
    assert len(set(ran.trained)) == 6 * 4


def undefined(episode):
    """Feedback with a metric that only failures have."""
    right = episode.reply == "a"
    left_out = {"distance": "nan"} if right else {}
    metrics = {} if right else {"distance": 0.5}
    return Judgement(reward=float(right), metrics=metrics, left_out=left_out)


def test_a_metric_that_only_failures_have_costs_no_success_its_reward():
    story = Run(environment=FakeEnvironment(undefined))()
    rewards = [r.reward for event in story.of(GroupsReady) for group in event.groups for r in group.rollouts]
    assert 0 < sum(rewards) < len(rewards) == 12 * 4 * 4
    (cause,) = {event.cause for event in story.of(WarningRaised)}
    assert cause == "left_out/task/distance"
    message = story.of(WarningRaised)[0].message
    assert re.fullmatch(
        r"task 'task': the metric 'distance' is nan for prompt '\d+', expected a finite number; it is left "
        r"out of \d+ of 16 rollouts, whose rewards stay",
        message,
    )


def test_a_metric_that_is_paid_is_a_reward_and_without_it_a_rollout_is_played_again():
    seen = set()

    def once(episode):
        first = episode.prompt.id not in seen
        seen.add(episode.prompt.id)
        return (
            Judgement(reward=1.0, left_out={"form": "nan"})
            if first
            else Feedback(metrics={"form": 1.0}, reward=1.0)
        )

    story = Run(environment=FakeEnvironment(once), shaping=Shaping(ShapingConfig(weights={"form": 1.0})))()
    assert story.result == "finished"
    assert [slot.attempts for event in story.of(Dispatched) for slot in event.slots].count(1) >= 48


class CountingEngine(FakeEngine):
    """Knows the largest number of requests that it had at the same time."""

    most = 0

    async def _one(self, request):
        self.most = max(self.most, self.running + 1)
        return await super()._one(request)


@pytest.mark.parametrize(("places", "most"), [(12, 12), (8, 8), (5, 4), (2, 4)])
@pytest.mark.long
def test_no_more_rollouts_are_played_at_the_same_time_than_there_are_places(places, most):
    """Groups have four rollouts, which begin together."""
    engine = CountingEngine()
    story = Run(engine=engine, places=FairSemaphore(places))()
    assert story.result == "finished"
    assert engine.most == most
    assert len(story.trained) == len(set(story.trained)) == 48


@pytest.mark.long
@pytest.mark.parametrize("policy", ["deadline", "in_order"])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_every_step_trains_its_prompts_once_and_in_time(policy, max_staleness, seed):
    done = Run(policy=policy, max_staleness=max_staleness)(seed)
    assert done.result == "finished"
    assert len(done.trained) == len(set(done.trained)) == 12 * 4
    assert sorted(map(int, done.trained)) == list(range(48)), "no prompt is drawn that is not trained"
    for event in done.of(StepEnded):
        assert event.metrics["staleness_max"] <= max_staleness
    assert [batch.step for batch in done.trainer.batches] == list(range(12))
    assert done.engine.version == 12
    assert done.engine.running == 0


@pytest.mark.long
def test_the_sampler_is_asked_after_the_slots_are_reserved():
    done = Run(policy="in_order", max_staleness=1, steps=4)()
    seen = [(r.generation_version, r.target_version, r.expected_prompts) for r in done.requests]
    assert seen == [(0, 0, 4), (0, 1, 4), (1, 2, 4), (2, 3, 4)]
    assert all(r.generation_version <= r.current_version <= r.target_version for r in done.requests)


def test_synchronous_is_staleness_zero():
    engine = FakeEngine(latency=lambda rng: 2.0)
    done = Run(max_staleness=0, engine=engine, steps=5)()
    assert all(event.metrics["staleness_max"] == 0 for event in done.of(StepEnded))
    assert all(
        event.metrics["time/step"] == pytest.approx(2.0 + 0.1 + 1.0 + 0.1) for event in done.of(StepEnded)[1:]
    )


def test_generation_and_training_overlap():
    """Balanced sides: a step takes as long as the slower of them, not their sum."""
    engine = FakeEngine(latency=lambda rng: 0.9, update_seconds=0.0)
    done = Run(max_staleness=2, engine=engine, environment=FakeEnvironment(seconds=0.0), steps=40)()
    times = [event.metrics["time/step"] for event in done.of(StepEnded)[5:]]
    assert sum(times) / len(times) == pytest.approx(1.0, rel=0.02)
    shares = [event.metrics["overlap"] for event in done.of(StepEnded)[5:-3]]
    assert sum(shares) / len(shares) == pytest.approx(0.9, abs=0.02), "generation waits for a tenth"


def test_a_straggler_does_not_hold_the_steps_that_need_not_wait():
    slow = {}

    def latency(rng):
        slow["n"] = slow.get("n", 0) + 1
        return 30.0 if slow["n"] == 1 else 0.5

    done = Run(max_staleness=4, engine=FakeEngine(latency=latency), steps=8)()
    first = [event.groups for event in done.of(GroupsReady)]
    step_of_straggler = next(i for i, groups in enumerate(first) if any(g.prompt.id == "0" for g in groups))
    assert step_of_straggler == 4, "trained at its deadline, neither dropped nor earlier"


@pytest.mark.long
def test_with_in_order_the_same_seed_gives_the_same_weights_whatever_finishes_first():
    def weights(schedule_seed):
        engine = FakeEngine(latency=lambda rng: rng.lognormvariate(0, 1))
        done = Run(policy="in_order", engine=engine, schedule={"in_flight_updates": False})(schedule_seed)
        return done.trainer.state

    assert len({weights(seed) for seed in range(8)}) == 1


def test_the_sampler_gets_the_trainers_version_although_the_engine_holds_an_older_one():
    """A filtered group frees its slot while the engine still takes the weights of the last step."""
    equal = FakeEnvironment(lambda e: Feedback(reward=float(e.prompt.id not in "048" and e.reply == "a")))
    dynamic = DynamicSampling(max_extra_groups=100)
    done = Run(environment=equal, engine=FakeEngine(update_seconds=2.0), dynamic=dynamic, max_staleness=2)
    versions = []

    def draw(request, draw=done.pipeline.prompts.draw):
        versions.append(done.trainer.version)
        return draw(request)

    done.pipeline.prompts.draw = draw
    done()
    assert [request.current_version for request in done.requests] == versions
    assert any(request.generation_version < request.current_version for request in done.requests)


@pytest.mark.long
def test_what_is_sampled_depends_on_the_seed_of_the_run_and_on_nothing_else():
    def seeds(seed):
        asked = []

        def reply(request, rng):
            asked.append(request.seed)
            return rng.choice("ab")

        Run(seed=seed, steps=3, policy="in_order", engine=FakeEngine(reply=reply))()
        return sorted(asked)

    assert len(set(seeds(0))) == len(seeds(0))
    assert seeds(0) == seeds(0)
    assert set(seeds(0)).isdisjoint(seeds(1))


# ---------------------------------------------------------------------------------- what goes wrong


@pytest.mark.long
def test_an_unscored_rollout_is_played_again_and_its_siblings_are_kept():
    failures = Counter()

    def feedback(episode):
        failures[episode.group] += 1
        if episode.group == "0" and failures["0"] == 1:
            return Feedback(error="KeyError: 'gold'")
        return Feedback(reward=float(episode.reply == "a"))

    done = Run(environment=FakeEnvironment(feedback))()
    assert failures["0"] == 4 + 1, "four rollouts, and one of them again"
    assert len(done.trained) == 48
    assert sum(event.metrics.get("errors/task", 0) for event in done.of(StepEnded)) == 1
    assert all(None not in group.rewards for event in done.of(GroupsReady) for group in event.groups)


def test_a_compared_group_is_retried_as_a_whole():
    failures = Counter()

    def feedback(episode):
        failures[episode.group] += 1
        if episode.group == "0" and failures["0"] == 1:
            return Feedback(error="KeyError: 'gold'")
        return Feedback(reward=float(episode.reply == "a"))

    environment = FakeEnvironment(feedback, needs_group=True)
    done = Run(environment=environment)()
    assert failures["0"] == 4 + 4
    assert set(environment.calls) == {4}, "each call has a whole group"
    assert len(done.trained) == 48
    assert sorted(environment.opened) == sorted(environment.closed), (
        "also of what was in flight when the run ended"
    )
    assert len(set(environment.opened)) == len(environment.opened) >= 49 * 4


def test_a_prompt_that_never_gets_a_reward_is_skipped_and_that_is_recorded():
    def feedback(episode):
        if episode.prompt.id == "2":
            return Feedback(error="ValueError: bad row")
        return Feedback(reward=1.0 if episode.reply == "a" else 0.0)

    incidents = []
    with reported_to(incidents.append):
        done = Run(environment=FakeEnvironment(feedback), max_retries=2)()
    assert [incident.message for incident in incidents if incident.kind == "skipped"] == [
        "prompt '2' is skipped after 3 attempts: ValueError: bad row"
    ]
    (skip,) = done.of(PromptSkipped)
    assert (skip.prompt, skip.task, skip.error) == ("2", "task", "ValueError: bad row")
    assert sorted(map(int, done.trained)) == [i for i in range(49) if i != 2]


@pytest.mark.long
def test_a_request_that_is_never_answered_costs_its_deadline_and_no_more():
    silent = {"left": 1}

    def latency(rng):
        if silent["left"]:
            silent["left"] -= 1
            return float("inf")
        return 0.5

    done = Run(engine=FakeEngine(latency=lambda rng: min(latency(rng), 1e6)))()
    assert len(done.trained) == 48
    assert sum(event.metrics.get("errors/task", 0) for event in done.of(StepEnded)) == 4, (
        "its group's rollouts"
    )
    assert sum(event.metrics["time/step"] for event in done.of(StepEnded)) < 60 + 12 * 3


def test_an_engine_that_gives_requests_up_gets_them_again():
    lost = {"left": 6}

    def fault(request):
        if lost["left"]:
            lost["left"] -= 1
            return EngineError("engine: its process died")
        return None

    done = Run(engine=FakeEngine(fault=fault))()
    assert sorted(map(int, done.trained)) == list(range(48))


WHO = ["engine", "environment", "trainer", "sampler", "update", "publish", "validate"]


@pytest.mark.long
@pytest.mark.parametrize("who", WHO)
def test_an_error_anywhere_ends_the_run_with_its_cause(who):
    class BoomError(Exception):
        pass

    run_ = Run(schedule={"validations": [Interval(3)]})

    async def boom(*args):
        raise BoomError(who)

    def boom_now(*args):
        raise BoomError(who)

    match who:
        case "engine":
            run_.engine.fault = lambda request: BoomError(who)
        case "environment":
            run_.environment.feedback = boom_now
        case "trainer":
            run_.trainer.step = boom
        case "sampler":
            run_.pipeline.prompts.draw = boom_now
        case "update":
            run_.engine.update_weights = boom
        case "publish":
            run_.trainer.publish = boom
        case "validate":
            run_.pipeline.validate = boom
    with pytest.raises(BoomError, match=who):
        run_()
    assert run_.engine.running == 0, "nobody is left generating"


def test_an_engine_that_reports_a_wrong_version_stops_the_run():
    class Stuck(FakeEngine):
        async def update_weights(self, weights):
            self.version = 0

    with pytest.raises(EngineError, match=r"tokens of version 0 for step 2; expected versions 1 to 2"):
        Run(engine=Stuck())()


@pytest.mark.long
def test_a_trainer_that_never_answers_is_named_by_the_backstop():
    class Silent(FakeEngine):
        async def generate(self, requests):
            await asyncio.sleep(1e9)

    with pytest.raises(
        DeadlineExceeded, match="waited 3600 s for ready groups at step 0; the buffer: BufferStatistics"
    ):
        Run(engine=Silent(), schedule={"rollout_deadline": None})()


def test_an_engine_that_never_takes_new_weights_is_named_at_its_deadline():
    class Deaf(FakeEngine):
        async def update_weights(self, weights):
            if weights.version == 2:
                await asyncio.sleep(1e9)
            await super().update_weights(weights)

    run_ = Run(engine=Deaf(), schedule={"sync_deadline": 30.0})
    with pytest.raises(WeightSyncError, match=r"update_weights\(\) of version 2 did not return within 30 s"):
        run_()


@pytest.mark.parametrize("who", ["engine", "sampler"])
def test_a_timeout_inside_a_plugin_is_not_reported_as_a_deadline_of_the_run(who):
    async def update_weights(weights):
        raise TimeoutError("the socket timed out")

    def draw(request):
        raise TimeoutError("the socket timed out")

    run_ = Run(schedule={"sync_deadline": 30.0})
    if who == "engine":
        run_.engine.update_weights = update_weights
    else:
        run_.pipeline.prompts.draw = draw
    with pytest.raises(TimeoutError, match="the socket timed out"):
        run_()


@pytest.mark.parametrize("dies", [True, False])
@pytest.mark.parametrize("version", [0, 2])
def test_a_death_is_the_cause_of_a_weight_sync_that_fails_at_the_same_time(dies, version):
    refused = asyncio.Event()

    class Refusing(FakeEngine):
        async def update_weights(self, weights):
            if weights.version == version:
                refused.set()
                raise WeightSyncError("the trainer's shared memory cannot be read")
            await super().update_weights(weights)

    async def died():
        await refused.wait()
        await asyncio.sleep(0.3 if dies else 1e6)
        raise TrainerError("trainer died (killed by SIGKILL)")

    run_ = Run(engine=Refusing(), watch=[died])
    with pytest.raises(TrainerError if dies else WeightSyncError, match=r"died|cannot be read"):
        run_()


def test_a_process_that_dies_while_the_first_weights_are_validated_ends_the_run_at_once():
    async def validate(version):
        await asyncio.sleep(1000)

    async def died():
        await asyncio.sleep(3)
        raise TrainerError("trainer died (killed by SIGKILL)")

    run_ = Run(watch=[died], validate=validate, schedule={"validations": [Interval(5, at_start=True)]})

    async def story():
        with pytest.raises(TrainerError, match="killed by SIGKILL"):
            await run_.pipeline.run()
        return asyncio.get_running_loop().time()

    assert run(story()) < 10


def test_masked_rollouts_are_counted_by_task_and_not_trained():
    run_ = Run(steps=3)
    run_.pipeline.learning.advantages = lambda groups: [[None, 1.0, None, -1.0] for _ in groups]
    run_()
    assert [event.metrics["masked/task"] for event in run_.of(StepEnded)] == [8.0] * 3
    assert [len(batch.rows) for batch in run_.trainer.batches] == [8] * 3


class Cutting(FakeEngine):
    """Cuts off the completions whose text is "b"."""

    async def _one(self, request):
        said = await super()._one(request)
        return said if chr(said.token_ids[0]) == "a" else Completion.of(said.tokens, "length")


def unscored_if_truncated(judge, **changes):
    run_ = Run(environment=FakeEnvironment(judge), **changes)
    run_.pipeline.playing.sampling = evolve(run_.pipeline.playing.sampling, truncated="unscored")
    return run_()


@pytest.mark.long
def test_a_truncated_rollout_may_stay_unscored_and_is_neither_judged_nor_trained_nor_played_again():
    def judge(episode):
        assert not episode.truncated
        return Feedback(reward=random.Random(repr(episode.session)).choice([0.0, 1.0]))

    run_ = unscored_if_truncated(judge, engine=Cutting())
    assert (run_.result, len(run_.trained)) == ("finished", 48)
    assert max(slot.attempts for event in run_.of(Dispatched) for slot in event.slots) == 0
    rollouts = [each for event in run_.of(GroupsReady) for group in event.groups for each in group.rollouts]
    assert {(each.truncated, each.reward is None, each.error) for each in rollouts} == {
        (True, True, None),
        (False, False, None),
    }
    assert not any(each.trained for each in rollouts if each.truncated)
    for event in run_.of(GroupsReady):
        for group in event.groups:
            known = [each for each in group.rollouts if each.reward is not None]
            advantages = group_advantages([evolve(group, rollouts=known)])[0]
            assert [each.advantage for each in known] == advantages, "the others are no part of the baseline"
    told = [event.metrics.get("unscored/task", 0.0) for event in run_.of(StepEnded)]
    assert sum(told) == sum(each.truncated for each in rollouts) > 0


def test_a_run_whose_rollouts_are_all_truncated_and_unscored_ends_without_an_error():
    run_ = unscored_if_truncated(lambda episode: 1 / 0, engine=Cutting(reply=lambda request, rng: "b"))
    assert (run_.result, run_.of(PromptSkipped), len(run_.of(StepEnded))) == ("finished", [], 12)
    last = run_.of(StepEnded)[-1].metrics
    assert (last["rows"], last["unscored/task"], "reward/task" in last) == (0.0, 16.0, False)


def test_with_dynamic_sampling_a_group_without_a_scored_difference_is_filtered():
    dynamic = DynamicSampling(max_extra_groups=1000)
    run_ = unscored_if_truncated(
        lambda episode: Feedback(reward=random.Random(repr(episode.session)).choice([0.0, 1.0])),
        engine=Cutting(),
        dynamic=dynamic,
    )
    assert run_.result == "finished"
    assert run_.of(GroupFiltered)
    for event in run_.of(GroupsReady):
        assert all(
            len({each.reward for each in group.rollouts if not each.truncated}) == 2 for group in event.groups
        )


@pytest.mark.long
def test_groups_with_equal_rewards_reach_the_trainer_if_the_loss_needs_all_rows():
    same = FakeEnvironment(lambda episode: Feedback(reward=1.0))
    rows = [
        len(batch.rows)
        for all_rows in (False, True)
        for batch in Run(steps=2, environment=same, all_rows=all_rows)().trainer.batches
    ]
    assert rows == [0, 0, 16, 16]


def test_advantages_of_the_wrong_shape_are_an_error_that_says_so():
    run_ = Run()
    run_.pipeline.learning.advantages = lambda groups: [[0.0] * len(group.rollouts) for group in groups[:-1]]
    with pytest.raises(
        PluginError, match=r"returned groups of sizes \[4, 4, 4\]; expected .* \[4, 4, 4, 4\]"
    ):
        run_()


def test_each_group_that_is_trained_or_filtered_is_observed_once():
    seen = []
    equal = FakeEnvironment(lambda e: Feedback(reward=float(e.prompt.id not in "048" and e.reply == "a")))
    dynamic = DynamicSampling(max_extra_groups=100)
    run_ = Run(environment=equal, dynamic=dynamic)
    run_.pipeline.prompts.observe = lambda groups: seen.append(list(groups))
    run_()
    trained = [list(event.groups) for event in run_.of(GroupsReady)]
    filtered = {event.prompt for event in run_.of(GroupFiltered)}
    assert [groups for groups in seen if len(groups) > 1] == trained
    assert {group.prompt.id for groups in seen if len(groups) == 1 for group in groups} == filtered
    assert filtered >= {"0", "4", "8"}


def test_metrics_of_the_trainer_are_those_of_the_step():
    class Telling(FakeTrainer):
        async def step(self, batch):
            result = await super().step(batch)
            return evolve(result, metrics={**result.metrics, "loss": 100.0 + batch.step})

    done = Run(trainer=Telling(), steps=3)()
    assert [event.metrics["loss"] for event in done.of(StepEnded)] == [100.0, 101.0, 102.0]


# ---------------------------------------------------------------------------------- validating, saving


@pytest.mark.long
def test_validation_runs_on_one_version_and_changes_no_training():
    seen = []

    def a_run(validate):
        done = Run(policy="in_order", schedule={"in_flight_updates": False, "validations": [Interval(4)]})
        if validate:

            async def measure(version):
                before = done.engine.version
                await asyncio.sleep(5.0)
                assert done.engine.version == before == version
                seen.append(version)
                return {"task": {"accuracy": 0.5}}

            done.pipeline.validate = measure
        return done(seed=1)

    with_, without = a_run(True), a_run(False)
    assert seen == [event.version for event in with_.of(Validated)] == [0, 4, 8, 12]
    assert with_.trainer.state == without.trainer.state
    assert with_.trained == without.trained


def cut(run_, saved):
    """A ``save`` that keeps the cut in memory, as the checkpoint does on disk."""

    async def save(version, failure=None):
        at = (
            version,
            run_.buffer.state_dict(),
            run_.stream.position,
            run_.trainer.version,
        )

        async def written():
            await asyncio.sleep(random.Random(version).uniform(0.0, 5.0))
            saved.append(at)
            return version

        return written

    return save


def resumed(saved, **changes):
    version, buffer, position, trainer = saved
    again = Run(trainer=FakeTrainer(version=trainer), **changes)
    again.buffer.load_state_dict(buffer)
    again.stream.position = position
    assert version == again.buffer.step
    return again


@pytest.mark.long
@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("policy", ["deadline", "in_order"])
def test_a_run_that_is_cut_and_resumed_trains_every_prompt_of_the_stream_once(policy, seed):
    saved = []
    changes = {"policy": policy, "max_staleness": seed % 4}
    first = Run(schedule={"save_every": 3}, **changes)
    first.pipeline.save = cut(first, saved)
    first(seed)
    version, *_ = at = saved[random.Random(seed).randrange(len(saved))]
    again = resumed(at, **changes)(seed + 1)
    trained = first.trained[: version * 4] + again.trained
    assert sorted(map(int, trained)) == list(range(48))


def test_stop_ends_after_the_step_with_a_checkpoint_and_the_rest_can_be_trained_later():
    saved = []
    first = Run()
    first.pipeline.save = cut(first, saved)

    async def story():
        running = asyncio.create_task(first.pipeline.run())
        await asyncio.sleep(7.3)
        first.pipeline.stop()
        return await running

    assert run(story()) == "interrupted"
    ((version, *_),) = saved
    assert 0 < version < 12
    again = resumed(saved[0])()
    assert sorted(map(int, first.trained + again.trained)) == list(range(48))


def test_a_run_that_is_stopped_begins_no_validation():
    begun = []
    run_ = Run(schedule={"validations": [Interval(1)]})

    async def validate(version):
        begun.append(version)
        return {"task": {"accuracy": 0.5}}

    class Stopping(FakeTrainer):
        async def step(self, batch):
            result = await super().step(batch)
            if batch.step == 3:
                run_.pipeline.stop()
            return result

    run_.pipeline.validate, run_.pipeline.trainer = validate, Stopping()
    assert run_().result == "interrupted"
    assert run_.buffer.step == 4
    assert begun == [0, 1, 2, 3]


def stopped_in(step, reason="interrupted", **changes):
    """A run that is stopped in a step, with what it saved and the versions that it validated."""
    begun, saved = [], []

    async def validate(version):
        begun.append(version)
        return {"task": {"accuracy": 0.5}}

    class Stopping(FakeTrainer):
        async def step(self, batch):
            result = await super().step(batch)
            if batch.step == step:
                run_.pipeline.stop(reason)
            return result

    run_ = Run(trainer=Stopping(), schedule={"validations": [Interval(4)]}, **changes)
    run_.pipeline.validate = validate
    run_.pipeline.save = cut(run_, saved)
    return run_().result, saved, begun


def test_a_run_that_is_stopped_in_its_last_step_leaves_its_validation_to_a_resume():
    result, (at,), begun = stopped_in(11)
    assert (result, at[0], begun) == ("interrupted", 12, [0, 4, 8])
    again, begun = resumed(at, schedule={"validations": [Interval(4)]}), []

    async def validate(version):
        begun.append(version)
        return {"task": {"accuracy": 0.5}}

    again.pipeline.validate, again.pipeline.validate_first = validate, True
    assert again().result == "finished"
    assert begun == [12]


def test_a_resumed_run_validates_the_version_that_was_due_when_it_was_stopped():
    _, (at,), begun = stopped_in(7)
    assert (at[0], begun) == (8, [0, 4])
    again, begun = resumed(at, schedule={"validations": [Interval(4)]}), []

    async def validate(version):
        begun.append(version)
        return {"task": {"accuracy": 0.5}}

    again.pipeline.validate, again.pipeline.validate_first = validate, True
    again()
    assert begun == [8, 12]


def stopped_at(moment, run_, **how):
    """Stop a run at a moment; return its result, the second in which it ended, and what it saved."""
    saved = []
    run_.pipeline.save = cut(run_, saved)

    async def story():
        running = asyncio.create_task(run_.pipeline.run())
        await asyncio.sleep(moment)
        run_.pipeline.stop(**how)
        return await running, asyncio.get_running_loop().time()

    result, at = run(story())
    return result, at, saved


def validates(seconds, begun):
    async def validate(version):
        begun.append(version)
        await asyncio.sleep(seconds)
        return {"task": {"accuracy": 0.5}}

    return validate


@pytest.mark.parametrize("pause", [False, True])
@pytest.mark.parametrize(("moment", "version"), [(5.0, 0), (1030.0, 4), (3050.0, 12)])
def test_a_validation_is_dropped_when_the_run_is_stopped_and_made_when_it_is_resumed(moment, version, pause):
    begun, schedule = [], {"validations": [Interval(4)], "pause_to_validate": pause}
    first = Run(schedule=schedule)
    first.pipeline.validate = validates(1000.0, begun)
    result, at, saved = stopped_at(moment, first)
    assert (result, begun[-1]) == ("interrupted", version)
    assert at < moment + 10, "a step and a checkpoint, and not the rest of a validation"
    assert [event.version for event in first.of(Validated)] == begun[:-1]
    if saved[-1][0] > version:  # training went on meanwhile
        return
    again, begun = resumed(saved[-1], schedule=schedule), []
    again.pipeline.validate, again.pipeline.validate_first = validates(1.0, begun), True
    assert again().result == "finished"
    assert begun == list(range(version, 13, 4))
    assert sorted(map(int, first.trained[: saved[-1][0] * 4] + again.trained)) == list(range(48))


def test_a_goal_lets_a_validation_that_runs_come_to_its_end():
    run_, begun = Run(schedule={"validations": [Interval(4)]}), []
    run_.pipeline.validate = validates(1000.0, begun)
    result, _, _ = stopped_at(1030.0, run_, reason="goal reached", at_leisure=True)
    assert (result, begun) == ("goal reached", [0, 4])
    assert [event.version for event in run_.of(Validated)] == [0, 4]


class SlowToUpdate(FakeEngine):
    """Takes an hour for the weights of one version."""

    def __init__(self, version):
        super().__init__()
        self.slow = version

    async def update_weights(self, weights):
        if weights.version == self.slow:
            await asyncio.sleep(3600.0)
        await super().update_weights(weights)


@pytest.mark.parametrize("save_every", [0, 3])
@pytest.mark.parametrize(("policy", "in_flight_updates"), [("deadline", True), ("in_order", False)])
@pytest.mark.parametrize("version", [0, 3, 12])
def test_a_run_that_is_stopped_waits_for_no_weight_sync(version, in_flight_updates, policy, save_every):
    """Neither for an engine that starts, nor for one that hangs; a resumed run trains what is left."""
    schedule = {"in_flight_updates": in_flight_updates, "save_every": save_every}
    changes = {"policy": policy, "schedule": schedule}
    first = Run(engine=SlowToUpdate(version), **changes)
    result, at, saved = stopped_at(60.0, first)
    assert result == "interrupted"
    assert at < 66.0
    trained = saved[-1][0]
    assert version <= trained <= version + 1
    assert trained == first.trainer.version
    again = resumed(saved[-1], **changes)()
    assert sorted(map(int, first.trained + again.trained)) == list(range(48))


def test_a_run_that_is_stopped_waits_for_no_group():
    first = Run(
        environment=FakeEnvironment(seconds=50_000.0), schedule={"rollout_deadline": 1e5, "stall": 1e5}
    )
    result, at, saved = stopped_at(60.0, first)
    assert (result, saved[-1][0]) == ("interrupted", 0)
    assert at < 66.0
    assert sorted(map(int, resumed(saved[-1])().trained)) == list(range(48))


def test_without_a_schedule_only_the_end_is_saved_and_nothing_is_validated():
    saved, begun = [], []
    run_ = Run(steps=3)

    async def validate(version):
        begun.append(version)

    run_.pipeline.save, run_.pipeline.validate = cut(run_, saved), validate
    run_()
    assert [version for version, *_ in saved] == [3]
    assert begun == []


# ---------------------------------------------------------------------------------- waiting


def test_an_update_that_waits_for_running_rollouts_admits_no_others():
    """Rollouts that failed meanwhile are played again after it."""
    chance = random.Random(0)
    environment = FakeEnvironment(
        lambda e: Feedback(error="again") if chance.random() < 0.1 else Feedback(reward=1.0)
    )
    done = Run(max_staleness=3, environment=environment, max_retries=9, schedule={"in_flight_updates": False})
    times = []
    done.pipeline.emit = lambda event: times.append((asyncio.get_running_loop().time(), event))
    done(seed=1)
    published, admitted = None, []
    for at, event in times:
        match event:
            case StepEnded():
                published = at
            case Synced():
                published = None
            case Dispatched() if published is not None and at > published:
                admitted.append(event)
    assert not admitted
    done.events = [event for _, event in times]
    assert any(slot.attempts for event in done.of(Dispatched) for slot in event.slots)


# ---------------------------------------------------------------------------------- checkpoints


def slow_disk(seconds, fails_at=None):
    """A ``save`` that returns at once, and a checkpoint that takes its time."""

    async def save(version, failure=None):
        async def written():
            await asyncio.sleep(seconds)
            if version == fails_at:
                raise CheckpointError("the disk is full")
            return Path(f"step-{version}")

        return written

    return save


def test_training_continues_while_a_checkpoint_is_written_and_only_the_next_one_waits_for_it():
    done = Run(schedule={"save_every": 4}, save=slow_disk(10_000.0))()
    story = [event for event in done.events if isinstance(event, (StepEnded, Saving, Saved))]
    saves = [(type(event).__name__, event.step) for event in story if not isinstance(event, StepEnded)]
    assert saves == [(kind, step) for step in (4, 8, 12) for kind in ("Saving", "Saved")]
    steps = [event.step for event in story[: story.index(done.of(Saved)[0])] if isinstance(event, StepEnded)]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 8], "up to the next cut"
    assert story[-1] == done.of(Saved)[-1], "the run ends when the last one is written"


@pytest.mark.long
def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_its_cause():
    done = Run(schedule={"save_every": 2}, save=slow_disk(3.0, fails_at=4))
    with pytest.raises(CheckpointError, match="the disk is full"):
        done()
    assert [event.step for event in done.of(Saved)] == [2, 6], "the one that the error leaves can be written"
    assert done.engine.running == 0


@pytest.mark.long
def test_the_end_of_a_run_whose_last_checkpoint_cannot_be_written_is_an_error():
    done = Run(save=slow_disk(3.0, fails_at=12))
    with pytest.raises(CheckpointError, match="the disk is full"):
        done()
