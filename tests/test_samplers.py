"""Samplers return exactly what was asked for, lose nothing, and continue where they were."""

import collections
import copy
import json
import random

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from grpo_core.errors import ConfigError, PluginError
from grpo_core.loaders import ShuffledIndices
from grpo_core.protocols import Sampler
from grpo_core.records import Group, Prompt, Rollout, SampleRequest
from grpo_core.samplers import Mix, RoundRobin, checked_sample


class PlainLoader:
    """A loader that counts what it gave away."""

    def __init__(self, task, n):
        self.indices = ShuffledIndices(n, seed=0, task=task)
        self.prompts = [Prompt(messages=f"{task} {i}", id=str(i), environment=task) for i in range(n)]
        self.served = 0

    def take(self, n):
        self.served += n
        self.indices.want = n
        return [self.prompts[index] for index in (next(self.indices) if n else ())]

    def __len__(self):
        return len(self.prompts)

    @property
    def epoch(self):
        return self.served / len(self)


def loaders(**sizes):
    return {task: PlainLoader(task, n) for task, n in (sizes or {"c": 50, "a": 3, "b": 7}).items()}


def request(n, version=0):
    return SampleRequest(
        generation_version=version, target_version=version + 1, current_version=version, expected_prompts=n
    )


def tasks(prompts):
    return [prompt.environment for prompt in prompts]


# --------------------------------------------------------------------------------- the contract, as a machine


class SamplerMachine(RuleBasedStateMachine):
    """A run: prompts are drawn, weights move on, groups come back late or never, and the run is resumed."""

    make = Mix

    def __init__(self):
        super().__init__()
        self.sampler = self.make()
        self.loaders = loaders()
        self.version = 0
        self.returned = []

    @rule(n=st.integers(1, 40), lead=st.integers(0, 3))
    def draw(self, n, lead):
        asked = SampleRequest(
            generation_version=max(0, self.version - lead),
            target_version=self.version + lead,
            current_version=self.version,
            expected_prompts=n,
        )
        self.returned += checked_sample(self.sampler, "tested", self.loaders, asked)

    @rule(by=st.integers(1, 3))
    def train(self, by):
        self.version += by

    @rule(rewards=st.lists(st.none() | st.floats(-1, 1), min_size=1, max_size=8))
    def hear_of_a_group(self, rewards):
        if self.returned and hasattr(self.sampler, "observe"):
            rollouts = tuple(Rollout(prompt_ids=(1,), reward=reward) for reward in rewards)
            group = Group(
                prompt=self.returned[0],
                rollouts=rollouts,
                generation_version=self.version,
                target_version=self.version,
            )
            self.sampler.observe([group])

    @rule()
    def resume(self):
        state = json.loads(json.dumps(self.sampler.state_dict()))
        assert len(json.dumps(state)) < 10_000
        uninterrupted = self.future(copy.deepcopy(self.sampler))
        for _ in range(2):
            resumed = self.make()
            resumed.load_state_dict(state)
            assert self.future(resumed) == uninterrupted, "a resumed sampler goes another way"

    def future(self, sampler):
        there = copy.deepcopy(self.loaders)
        return [checked_sample(sampler, "tested", there, request(n, self.version)) for n in (5, 1, 17)]

    @invariant()
    def nothing_is_drawn_and_thrown_away(self):
        served = {task: loader.served for task, loader in self.loaders.items()}
        assert served == dict.fromkeys(self.loaders, 0) | collections.Counter(tasks(self.returned))


class Forgetful(Mix):
    def load_state_dict(self, state):
        pass


class Wasteful(Mix):
    def sample(self, loaders, request):
        return loaders["c"].take(request.expected_prompts + 3)[: request.expected_prompts]


class PerTask(Mix):
    def sample(self, loaders, request):
        return [prompt for loader in loaders.values() for prompt in loader.take(4)]


class Undetermined(Mix):
    def sample(self, loaders, request):
        return loaders[random.SystemRandom().choice("abc")].take(request.expected_prompts)


def check(sampler):
    machine = type("Machine", (SamplerMachine,), {"make": staticmethod(sampler)})
    run_state_machine_as_test(
        machine,
        settings=settings(max_examples=40, stateful_step_count=15, phases=[Phase.generate], print_blob=False),
    )


@pytest.mark.parametrize(
    "make", [Mix, lambda: Mix({"a": 5, "b": 0}, seed=3), RoundRobin], ids=["mix", "weighted", "round robin"]
)
def test_built_in_samplers_keep_the_contract(make):
    assert isinstance(make(), Sampler)
    check(make)


@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        (Forgetful, "a resumed sampler goes another way"),
        (Undetermined, "a resumed sampler goes another way"),
        (Wasteful, "assert {.*} == .*{"),
        (PerTask, "returned 12 prompts, expected exactly"),
    ],
)
def test_the_contract_finds_samplers_that_break_it(faulty, message):
    with pytest.raises((AssertionError, PluginError), match=message):
        check(faulty)


# ---------------------------------------------------------------------------------- mix and round robin


def test_a_mix_follows_its_weights():
    drawn = collections.Counter(tasks(Mix({"a": 3, "b": 1, "c": 0}).sample(loaders(), request(4000))))
    assert drawn["c"] == 0
    assert 2850 < drawn["a"] < 3150


def test_without_weights_all_tasks_are_alike_and_the_seed_decides():
    drawn = collections.Counter(tasks(Mix().sample(loaders(), request(3000))))
    assert all(900 < count < 1100 for count in drawn.values())
    assert tasks(Mix(seed=1).sample(loaders(), request(30))) != tasks(
        Mix(seed=2).sample(loaders(), request(30))
    )


def test_a_round_goes_by_name_and_continues():
    sampler, there = RoundRobin(), loaders()
    assert tasks(sampler.sample(there, request(4))) == ["a", "b", "c", "a"]
    assert tasks(sampler.sample(there, request(3))) == ["b", "c", "a"]


def test_a_weight_for_an_unknown_task_names_the_nearest():
    with pytest.raises(ConfigError) as caught:
        Mix({"adition": 1}).sample(loaders(addition=3, sort=3), request(1))
    assert str(caught.value) == (
        "sampler mix: there is no task 'adition' to weigh. Did you mean 'addition'? Tasks: addition, sort"
    )


@pytest.mark.parametrize("weight", [-1, float("nan"), float("inf"), "2", True])
def test_a_weight_is_a_number(weight):
    with pytest.raises(ConfigError, match=r"sampler mix: the weight of task 'a' is .*, expected a"):
        Mix({"a": weight})


def test_all_weights_zero_is_an_error():
    with pytest.raises(ConfigError, match="every task has weight 0"):
        Mix({"a": 0}).sample(loaders(a=3), request(1))


# --------------------------------------------------------------------------------- what a bad sampler is told


class Says:
    def __init__(self, answer):
        self.answer = answer

    def sample(self, loaders, request):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


KNOWN = Prompt(messages="x", environment="a")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([KNOWN], "sampler 'mine:odd' returned 1 prompts, expected exactly 2 (SampleRequest("),
        ([KNOWN] * 3, "sampler 'mine:odd' returned 3 prompts, expected exactly 2 (SampleRequest("),
        (None, "sampler 'mine:odd' returned NoneType, expected a list of prompts"),
        ([KNOWN, "x"], "sampler 'mine:odd' returned str at 1, expected grpo_core.Prompt"),
        (
            [KNOWN, Prompt(messages="x", environment="z")],
            "sampler 'mine:odd' returned a prompt of task 'z' at 1, expected one of a, b, c",
        ),
        (KeyError("gold"), "sampler 'mine:odd' raised KeyError: 'gold' (asked with SampleRequest("),
    ],
)
def test_a_bad_draw_is_an_error_that_names_the_sampler_and_the_numbers(answer, message):
    with pytest.raises(PluginError) as caught:
        checked_sample(Says(answer), "mine:odd", loaders(), request(2))
    assert str(caught.value).startswith(message)
