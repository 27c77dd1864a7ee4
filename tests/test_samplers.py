"""Samplers return exactly what was asked for, lose nothing, and continue where they were."""

import collections
import copy
import random
from pathlib import Path

import pytest

from grpo_core.app import making
from grpo_core.config import build
from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.contracts.records import Prompt, SampleRequest
from grpo_core.data.samplers import Mix, PromptStream, RoundRobin, checked_sample
from grpo_core.plugins.host import PluginHost
from grpo_core.testing import MemoryLoader
from grpo_plugin_curriculum.curriculum import Curriculum, Schedule, TaskOrder
from grpo_plugin_devkit.samplers import check_sampler


def loaders(**sizes):
    return {task: MemoryLoader(task, n) for task, n in (sizes or {"c": 50, "a": 3, "b": 7}).items()}


def request(n, version=0):
    return SampleRequest(
        generation_version=version, target_version=version + 1, current_version=version, expected_prompts=n
    )


def tasks(prompts):
    return [prompt.environment for prompt in prompts]


# ---------------------------------------------------------------------------------- the contract


BUILT_IN = {
    "mix": Mix,
    "weighted": lambda: Mix({"a": 5, "b": 0}, seed=3),
    "round robin": RoundRobin,
    "chosen": lambda: TaskOrder([["a", "b"], "c"]),
    "schedule": lambda: Schedule({"a": [[0, 1], [5, 0]], "b": [[2, 0.5]]}),
    "curriculum": lambda: Curriculum(known_after=1, window=3),
}


@pytest.mark.long
@pytest.mark.parametrize("make", BUILT_IN.values(), ids=BUILT_IN)
def test_built_in_samplers_keep_the_contract(make):
    check_sampler(make, examples=40)


@pytest.mark.long
@pytest.mark.parametrize("name", ["HardLater", "Fading"])
def test_the_samplers_of_the_example_keep_the_contract(name):
    file = Path(__file__).parent.parent / "examples" / "custom_sampler.py"
    make = PluginHost.discover(allow=[]).factory("sampler", f"{file}:{name}")
    check_sampler(make, tasks={"reverse": 3, "sort": 7}, examples=40)


class Forgetful(Mix):
    def load_state_dict(self, state):
        pass


class ForgetsWhatItHeard(Curriculum):
    """Only what was observed is missing from its state."""

    def state_dict(self):
        return {**super().state_dict(), "rates": {}}


class Wasteful(Mix):
    def sample(self, loaders, request):
        return loaders["c"].take(request.expected_prompts + 3)[: request.expected_prompts]


class MakesItsOwn:
    """Returns prompts that no loader has, as a run allows."""

    def __init__(self):
        self.made = 0

    def sample(self, loaders, request):
        numbers = range(self.made, self.made + request.expected_prompts - 1)
        self.made += len(numbers)
        own = [Prompt(messages=f"{n}", id=f"own {n}", environment="c") for n in numbers]
        return [*loaders["c"].take(1), *own]

    def state_dict(self):
        return {"made": self.made}

    def load_state_dict(self, state):
        self.made = state["made"]


class ReturnsTwice(Mix):
    def sample(self, loaders, request):
        (prompt,) = loaders["c"].take(1)
        return [prompt] * request.expected_prompts


class PerTask(Mix):
    def sample(self, loaders, request):
        return [prompt for loader in loaders.values() for prompt in loader.take(4)]


class Undetermined(Mix):
    def sample(self, loaders, request):
        return loaders[random.SystemRandom().choice("abc")].take(request.expected_prompts)


class KeepsEverything(Mix):
    def state_dict(self):
        return {**super().state_dict(), "history": "prompt" * 20_000}


@pytest.mark.long
@pytest.mark.parametrize(
    ("faulty", "message"),
    [
        (Forgetful, "a resumed sampler draws other prompts than an uninterrupted one"),
        (lambda: ForgetsWhatItHeard(known_after=1), "a resumed sampler draws other prompts"),
        (Undetermined, "the same calls, repeated, gave other|draws? other prompts"),
        (Wasteful, r"taken from the loaders and not returned: \[\('c'"),
        (ReturnsTwice, r"returned more often than taken: \[\('c'"),
        (PerTask, "returned 12 prompts, expected exactly"),
        (KeepsEverything, "the state has 120,"),
    ],
)
def test_the_contract_finds_samplers_that_break_it(faulty, message):
    with pytest.raises((AssertionError, PluginError), match=message):
        check_sampler(faulty, examples=60)


@pytest.mark.long
def test_a_sampler_may_make_its_own_prompts():
    check_sampler(MakesItsOwn, examples=60)


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


# ---------------------------------------------------------------------------------- what a bad one is told


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
        (KeyError("gold"), "sampler 'mine:odd' raised test_samplers.py:"),
    ],
)
def test_a_bad_draw_is_an_error_that_names_the_sampler_and_the_numbers(answer, message):
    with pytest.raises(PluginError) as caught:
        checked_sample(Says(answer), "mine:odd", loaders(), request(2))
    assert str(caught.value).startswith(message)


# ---------------------------------------------------------------------------------- functions and copies


FUNCTION = """
import grpo_core as grpo

def pick(loaders, request, *, first="a"):
    return grpo.take_prompts(loaders, [first] * request.expected_prompts)
"""


def test_a_plain_function_of_a_file_is_a_sampler(tmp_path):
    (tmp_path / "own.py").write_text(FUNCTION)
    chosen = {"name": f"{tmp_path}/own.py:pick", "options": {"first": "b"}}
    sampler = making.sampler(build([{"sampler": chosen}]), PluginHost.discover(()))
    stream = PromptStream(sampler=sampler, loaders=loaders(a=5, b=5), name="pick")
    assert [prompt.environment for prompt in stream.draw(request(2))] == ["b", "b"]
    assert stream.state_dict() is None
    wrong = build([{"sampler": {**chosen, "options": {"frist": "b"}}}])
    with pytest.raises(ConfigError, match=r"no parameter 'frist' for sampler\.options\.frist"):
        making.sampler(wrong, PluginHost.discover(()))


def test_a_loader_that_a_sampler_gets_can_be_copied():
    class Copies(RoundRobin):
        def sample(self, loaders, request):
            return super().sample({task: copy.copy(loader) for task, loader in loaders.items()}, request)

    stream = PromptStream(sampler=Copies(), loaders=loaders(a=3), name="copies")
    assert len(stream.draw(request(2))) == 2
