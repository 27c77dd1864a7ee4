"""Dynamic sampling: groups that teach nothing are replaced, counted, and never trained."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from grpo_core.contracts.errors import SamplingError
from grpo_core.contracts.events import Dispatched, GroupFiltered, GroupsReady, StepEnded
from grpo_core.contracts.records import Feedback, Group, Prompt, Rollout
from grpo_core.contracts.typed import checked
from grpo_core.data.loaders import IndexedLoader
from grpo_core.data.samplers import Mix, PromptStream, RoundRobin
from grpo_core.loop import checkpoint
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.dynamic import DynamicSampling
from grpo_core.loop.pipeline import Learning, Pipeline, Playing
from grpo_core.loop.pipeline import Schedule as When
from grpo_core.loop.rollout import SamplingParams
from grpo_core.loop.rows import group as group_advantages
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer, FakeTrainer, prompts, run
from grpo_plugin_curriculum.curriculum import Curriculum, Schedule

# ---------------------------------------------------------------------------------- which groups


def group(*rewards, task="task"):
    return Group(
        prompt=Prompt(messages="x", environment=task),
        rollouts=tuple(Rollout(reward=reward) for reward in rewards),
        generation_version=0,
        target_version=0,
    )


@pytest.mark.parametrize(
    ("rewards", "tolerance", "kept"),
    [
        ((1, 0, 0, 0), 0.0, True),
        ((0, 0, 0, 0), 0.0, False),
        ((1, 1, 1, 1), 0.0, False),
        ((0.3, 0.1 + 0.2, 0.3), 0.0, False),
        ((1e-9, 2e-9), 0.0, True),
        ((0.5, 0.55), 0.1, False),
        ((0.5, 0.65), 0.1, True),
        ((7.0,), 0.0, False),
    ],
)
def test_a_group_trains_if_its_rewards_differ(rewards, tolerance, kept):
    dynamic = DynamicSampling(tolerance=tolerance, max_extra_groups=9)
    assert (dynamic.rejects(group(*rewards)) is None) is kept


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=8))
@example([0.0, 1e-291])
def test_without_a_tolerance_exactly_the_groups_without_advantages_are_filtered(rewards):
    kept = DynamicSampling(max_extra_groups=9).rejects(group(*rewards)) is None
    assert kept is any(group_advantages([group(*rewards)])[0])


def test_filtered_groups_are_counted_by_task_until_the_step():
    dynamic = DynamicSampling(max_extra_groups=9)
    for one in (group(0, 0, task="a"), group(1, 1, task="a"), group(0, 1, task="a"), group(0, 1, task="b")):
        dynamic.rejects(one)
    assert dynamic.read() == {
        "filtered/a": 2.0,
        "filtered_fraction/a": 2 / 3,
        "filtered_reward/a": 0.5,
        "filtered/b": 0.0,
        "filtered_fraction/b": 0.0,
    }
    assert dynamic.read() == {}


def test_too_many_filtered_groups_are_an_error_with_the_pass_rate():
    dynamic = DynamicSampling(max_extra_groups=2)
    for one in (group(0, 1), group(0, 0), group(1, 1)):
        dynamic.rejects(one)
    with pytest.raises(SamplingError) as caught:
        dynamic.rejects(group(1, 1, task="b"))
    assert "1 of 4 groups passed (25.0%), the other 3 had equal rewards" in str(caught.value)
    assert "max_extra_groups is 2 (b: 0 of 1 passed, mean reward of the others 1, task: 1 of 3 passed, " in (
        str(caught.value)
    )


def test_too_many_groups_that_another_filter_rejects_name_that_filter():
    dynamic = DynamicSampling(
        tolerance=None, max_extra_groups=0, filters={"mean_length": lambda _: "too short"}
    )
    with pytest.raises(
        SamplingError, match=r"^filters: .* Widen \[filters.mean_length\], or set a higher limit"
    ):
        dynamic.rejects(group(0, 1))


# ---------------------------------------------------------------------------------- in the pipeline


TASKS = ("easy", "hard")


def rewards_of(prompt: Prompt) -> str:
    """A third of the prompts teaches nothing, and half of the hard ones."""
    number = int(prompt.id)
    return "same" if number % 3 == 0 or (prompt.environment == "hard" and number % 2) else "mixed"


async def written():
    """There is nothing on a disk to wait for."""


class Run:
    """The real pipeline, buffer, loaders and samplers, with fakes around them."""

    def __init__(self, sampler, *, policy="deadline", max_staleness=1, steps=10, environment=None, extra=50):
        self.events, self.saved = [], []
        self.loaders = {task: IndexedLoader(task, prompts(200, task), seed=0) for task in TASKS}
        self.sampler = sampler
        self.buffer = Buffer(prompts_per_step=4, max_staleness=max_staleness, num_steps=steps, policy=policy)
        self.trainer = FakeTrainer()
        self.drawn_from = stream = PromptStream(sampler=sampler, loaders=self.loaders, name="tested")
        self.pipeline = Pipeline(
            buffer=self.buffer,
            prompts=stream,
            engine=FakeEngine(),
            playing=Playing(
                environments=dict.fromkeys(TASKS, environment or FakeEnvironment(self.feedback)),
                renderer=FakeRenderer(),
                sampling=SamplingParams(temperature=1.0, max_tokens=8),
                group_size=4,
            ),
            learning=Learning(advantages=group_advantages, dynamic=DynamicSampling(max_extra_groups=extra)),
            trainer=self.trainer,
            emit=self.events.append,
            schedule=When(rollout_deadline=60.0, stall=3600.0, save_every=1, in_flight_updates=False),
            save=self.save,
        )
        self.asked = Counter()

    def feedback(self, episode):
        """Two of the four rollouts of a mixed prompt succeed."""
        if rewards_of(episode.prompt) == "same":
            return Feedback(reward=float(int(episode.prompt.id) % 2))
        self.asked[episode.group] += 1
        return Feedback(reward=float(self.asked[episode.group] % 2))

    async def save(self, version, failure):
        """The cut as the checkpoint writes it, and the trainer's version."""
        cut = checkpoint.snapshot(self.buffer, self.drawn_from)
        state = json.loads(checkpoint.as_json(cut))
        loaders = {task: loader.state_dict() for task, loader in self.loaders.items()}
        self.saved.append((json.dumps([state, loaders, version, self.trainer.state]), cut["buffer"]["ready"]))
        return written

    def resume(self, saved):
        text, ready = saved
        segments = [rollout.segments for _, group in ready for rollout in group.rollouts]
        state, loaders, version, trained = json.loads(text)
        for task, loader in self.loaders.items():
            loader.load_state_dict(loaders[task])
        self.drawn_from.load_state_dict(state["sampler"])
        checkpoint.load_buffer(
            self.buffer,
            checked(state["buffer"], checkpoint.SavedBuffer),
            segments,
            lambda task, id, slot: self.loaders[task].prompt(id),
        )
        self.trainer.version, self.trainer.state = version, trained
        return self

    def __call__(self, seed=None):
        self.result = run(self.pipeline.run(), seed=seed)
        return self

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    @property
    def trained(self):
        return [name(group.prompt) for event in self.of(GroupsReady) for group in event.groups]

    @property
    def filtered(self):
        return [(event.task, event.prompt) for event in self.of(GroupFiltered)]

    @property
    def stream(self):
        """Prompts in the order in which they were drawn."""
        slots = itertools.chain.from_iterable(event.slots for event in self.of(Dispatched))
        return [name(prompt) for _, prompt in sorted({slot.id: slot.prompt for slot in slots}.items())]


def name(prompt):
    return prompt.environment, prompt.id


SAMPLERS = {
    "mix": Mix,
    "round robin": RoundRobin,
    "schedule": lambda: Schedule({"easy": [[0, 1], [10, 0.2]]}),
    "curriculum": lambda: Curriculum(known_after=2, window=8),
}


def tasks_by_step(*runs):
    return {
        event.step: Counter(group.prompt.environment for group in event.groups)
        for run_ in runs
        for event in run_.of(GroupsReady)
    }


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
@pytest.mark.parametrize("seed", range(3))
def test_with_exact_shares_each_step_trains_its_quota_whatever_is_filtered_also_after_a_resume(
    max_staleness, seed
):
    """A third of the easy prompts is filtered, and two thirds of the hard ones."""

    def mix():
        return Mix({"easy": 2, "hard": 1}, shares="trained")

    options = {"policy": "in_order", "max_staleness": max_staleness, "steps": 9}
    whole = Run(mix(), **options)(seed)
    quotas = [{"easy": easy, "hard": 4 - easy} for easy in (3, 2, 3)] * 3
    assert tasks_by_step(whole) == dict(enumerate(quotas))
    assert len(whole.filtered) > 9
    for cut in (2, 5):
        again = Run(mix(), **options).resume(whole.saved[cut])(seed + 1)
        assert tasks_by_step(again) == dict(list(enumerate(quotas))[cut + 1 :])


@pytest.mark.long
@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("policy", ["deadline", "in_order"])
@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_each_step_is_full_of_groups_that_teach(make, policy, max_staleness):
    done = Run(make(), policy=policy, max_staleness=max_staleness)(seed=1)
    assert done.result == "finished"
    assert [len(event.groups) for event in done.of(GroupsReady)] == [4] * 10
    assert all(len(batch.rows) == 4 * 4 for batch in done.trainer.batches), "no row without an advantage"
    assert {rewards_of(g.prompt) for event in done.of(GroupsReady) for g in event.groups} == {"mixed"}
    assert done.filtered, "there was something to filter"
    assert sorted(done.trained + done.filtered) == sorted(done.stream), "none is lost, none is doubled"
    now = done.buffer.statistics()
    assert now.filtered == len(done.filtered)
    assert now.dispatched == now.trained + now.filtered == len(done.stream)
    for event in done.of(StepEnded):
        assert event.metrics["staleness_max"] <= max_staleness


def test_filtered_groups_are_in_the_metrics_of_their_task():
    done = Run(Mix(), max_staleness=0)(seed=2)
    counted = Counter()
    for event in done.of(StepEnded):
        for task in TASKS:
            counted[task] += event.metrics.get(f"filtered/{task}", 0)
    assert counted == Counter(task for task, _ in done.filtered)
    assert done.of(StepEnded)[-1].metrics["buffer/filtered"] == len(done.filtered)


def test_a_sampler_hears_of_every_group_that_is_finished():
    class Listening(Mix):
        def __init__(self):
            super().__init__()
            self.heard = []

        def observe(self, groups):
            self.heard += [name(group.prompt) for group in groups]

    done = Run(Listening())(seed=3)
    assert sorted(done.sampler.heard) == sorted(done.trained + done.filtered)


def test_a_model_that_solves_nothing_ends_the_run_with_the_pass_rate():
    with pytest.raises(SamplingError, match=r"0 of 8 groups passed \(0.0%\), the other 8 had equal rewards"):
        Run(Mix(), environment=FakeEnvironment(lambda episode: Feedback(reward=0.0)), extra=7)()


def test_the_limit_is_of_one_step():
    done = Run(Mix(), extra=20, steps=30)(seed=4)
    assert len(done.filtered) > 20


# ---------------------------------------------------------------------------------- cut and resumed


@pytest.mark.long
@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("policy", ["deadline", "in_order"])
@pytest.mark.parametrize("max_staleness", [0, 2])
def test_a_run_that_is_cut_anywhere_loses_nothing(make, policy, max_staleness):
    options = {"policy": policy, "max_staleness": max_staleness}
    first = Run(make(), **options)(seed=5)
    for step in (1, 4, 9):
        again = Run(make(), **options).resume(first.saved[step - 1])(seed=step)
        before = [name(g.prompt) for event in first.of(GroupsReady)[:step] for g in event.groups]
        state = json.loads(first.saved[step - 1][0])[0]["buffer"]
        pending = [slot["id"] for slot in state["retrying"]] + [slot["id"] for slot, _ in state["ready"]]
        filtered = [name for place, name in enumerate(first.stream) if place < state["dispatched"]]
        gone = set(filtered) - set(before) - {first.stream[place] for place in pending}
        assert len(gone) == state["filtered"], "filtered before the cut"
        drawn = set(first.stream[: state["dispatched"]]) | set(again.stream)
        trained = before + again.trained
        assert len(trained) == len(set(trained)) == 40
        assert set(trained) | gone | set(again.filtered) == drawn
        assert not set(trained) & (gone | set(again.filtered))
        assert again.buffer.statistics().filtered == len(gone) + len(again.filtered)


@pytest.mark.parametrize("make", SAMPLERS.values(), ids=SAMPLERS)
def test_a_resumed_run_draws_the_same_prompts(make):
    """With one group at a time nothing depends on which rollout is first: also what a curriculum learnt."""
    whole = Run(make(), policy="in_order", max_staleness=0)
    whole.pipeline.engine.latency = lambda rng: 1.0
    whole()
    for step in (1, 3, 8):
        again = Run(make(), policy="in_order", max_staleness=0).resume(whole.saved[step - 1])
        again.pipeline.engine.latency = lambda rng: 1.0
        again()
        assert again.trained == whole.trained[step * 4 :]
        assert again.sampler.state_dict() == whole.sampler.state_dict()
        assert again.trainer.state == whole.trainer.state


@pytest.mark.long
def test_prompts_in_flight_at_the_cut_come_again_in_their_order():
    first = Run(Curriculum(known_after=2), max_staleness=3)(seed=6)
    state = json.loads(first.saved[2][0])[0]["buffer"]
    assert state["retrying"], "something was in flight"
    again = Run(Curriculum(known_after=2), max_staleness=3).resume(first.saved[2])(seed=7)
    offered = [slot.id for event in again.of(Dispatched) for slot in event.slots]
    expected = [slot["id"] for slot in state["retrying"]]
    assert offered[: len(expected)] == expected
    assert offered[len(expected)] == state["dispatched"], "and only then the stream goes on"
