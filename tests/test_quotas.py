"""Exact shares of tasks: each request is divided by largest remainders, and the rest is carried over."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.contracts.errors import CheckpointError, PluginError
from grpo_core.contracts.records import Prompt, SampleRequest
from grpo_core.data.samplers import Mix, PromptStream, Quotas, load_plugin_state
from grpo_core.testing import MemoryLoader, make_offer
from grpo_plugin_curriculum.curriculum import Curriculum, Schedule
from grpo_plugin_curriculum.learnable_prompts import LearnablePrompts
from grpo_plugin_devkit.samplers import check_sampler

WEIGHTS = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 20), min_size=1)


def request(n, version=0):
    return SampleRequest(
        generation_version=version, target_version=version, current_version=version, expected_prompts=n
    )


# ---------------------------------------------------------------------------------- the law


@given(weights=WEIGHTS, requests=st.lists(st.integers(1, 40), max_size=60))
def test_no_task_is_given_a_whole_prompt_more_than_its_share_and_whole_shares_are_exact(weights, requests):
    quotas, total, drawn = Quotas({}, []), sum(weights.values()), Counter()
    for n in requests:
        given_now = quotas.divide(weights, n)
        assert len(given_now) == n
        drawn.update(given_now)
        shares = {task: Fraction(drawn.total() * weight, total) for task, weight in weights.items()}
        assert all(drawn[task] < share + 1 for task, share in shares.items())
        if all(share.denominator == 1 for share in shares.values()):
            assert drawn == shares
        assert all(abs(quotas.owed[task] - float(shares[task] - drawn[task])) < 1e-6 for task in weights)


@pytest.mark.long
@given(weights=WEIGHTS, n=st.integers(1, 40), steps=st.integers(1, 60))
def test_a_task_has_its_share_of_each_step_or_one_prompt_more_or_less(weights, n, steps):
    """With requests of one size; and over all steps its share is exact but for less than a prompt a task."""
    quotas, total = Quotas({}, []), sum(weights.values())
    counts = [Counter(quotas.divide(weights, n)) for _ in range(steps)]
    for task, weight in weights.items():
        share = n * weight / total
        bound = len(weights) if len(weights) > 3 else 2
        assert all(abs(count[task] - share) < bound for count in counts)
        assert abs(sum(count[task] for count in counts) - steps * share) < max(1, len(weights) - 1)


def test_what_cannot_be_divided_is_carried_over():
    quotas = Quotas({}, [])
    steps = [Counter(quotas.divide({"a": 2, "b": 1}, 16)) for _ in range(6)]
    assert [(step["a"], step["b"]) for step in steps] == [(11, 5), (10, 6), (11, 5)] * 2


@given(weights=WEIGHTS, n=st.integers(2, 60))
def test_the_tasks_of_a_request_are_mixed_evenly(weights, n):
    """Any part from the beginning has about its share: a large request may fill several steps."""
    tasks = Quotas({}, []).divide(weights, n)
    whole = Counter(tasks)
    for place in range(1, n + 1):
        part = Counter(tasks[:place])
        assert all(abs(part[task] - place * count / n) < len(whole) for task, count in whole.items())


@pytest.mark.long
@given(
    weights=WEIGHTS,
    story=st.lists(st.tuples(st.integers(1, 20), st.lists(st.integers(0, 99), max_size=5)), max_size=30),
)
def test_what_is_replaced_leaves_the_shares_of_the_others_exact(weights, story):
    """Drawn less lost is as exact as without any loss, once all losses are replaced."""
    quotas, total, drawn, lost = Quotas({}, []), sum(weights.values()), Counter(), Counter()
    for n, losses in story:
        drawn.update(quotas.divide(weights, n))
        for place in losses:
            task = sorted(drawn.elements())[place % drawn.total()]
            quotas.lost.append((task, 0))
            lost[task] += 1
    if waiting := len(quotas.lost):
        drawn.update(quotas.divide(weights, waiting))
    kept = drawn.total() - lost.total()
    for task, weight in weights.items():
        assert drawn[task] - lost[task] < Fraction(kept * weight, total) + 1


def test_a_task_that_loses_its_weight_forgets_what_it_was_owed():
    quotas = Quotas({}, [])
    quotas.divide({"a": 1, "b": 1, "c": 1}, 4)
    quotas.lost.append(("c", 0))
    for _ in range(5):
        assert Counter(quotas.divide({"a": 1, "b": 1, "c": 0}, 4)) == {"a": 2, "b": 2}
    assert math.isclose(sum(quotas.owed.values()), 0, abs_tol=1e-6)


# ---------------------------------------------------------------------------------- samplers

MAKERS = {
    "mix": lambda **options: Mix({"a": 5, "b": 0}, seed=3, **options),
    "schedule": lambda **options: Schedule({"a": [[0, 1], [5, 0]], "b": [[2, 0.5]]}, **options),
    "curriculum": lambda **options: Curriculum(known_after=1, window=3, **options),
    "learnable_prompts": lambda **options: LearnablePrompts(**options),
}


@pytest.mark.long
@pytest.mark.parametrize("shares", ["drawn", "trained"])
@pytest.mark.parametrize("name", MAKERS)
def test_samplers_with_exact_shares_keep_the_contract(name, shares):
    check_sampler(lambda: MAKERS[name](shares=shares), examples=25)


def test_anything_else_is_refused():
    with pytest.raises(PluginError, match="'shares' is 'exact'; expected 'random' or 'drawn' or 'trained'"):
        make_offer("sampler", "mix", shares="exact")


def stream(shares):
    loaders = {task: MemoryLoader(task, 50) for task in "ab"}
    return PromptStream(sampler=Mix({"a": 2, "b": 1}, shares=shares), loaders=loaders, name="mix")


def lost(task):
    return Prompt(messages="x", id="0", environment=task)


@pytest.mark.parametrize(("shares", "instead"), [("drawn", ["b", "a"]), ("trained", ["a", "a"])])
def test_a_lost_prompt_is_replaced_by_its_task_or_by_the_one_that_is_owed_most(shares, instead):
    prompts = stream(shares)
    prompts.draw(request(4))
    for task in ("a", "a"):
        prompts.untrained(lost(task), 0)
    drawn = [prompts.draw(request(1))[0].environment for _ in range(2)]
    assert drawn == instead


def test_what_a_step_lost_is_replaced_in_that_step():
    prompts = stream("trained")
    prompts.draw(request(12))
    prompts.untrained(lost("a"), 3)
    prompts.untrained(lost("b"), 1)
    assert [prompts.draw(request(1, version))[0].environment for version in (1, 3)] == ["b", "a"]


def test_a_resumed_run_replaces_what_was_lost_before():
    first, second = stream("trained"), stream("trained")
    first.draw(request(5))
    first.untrained(lost("b"), 0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    tasks = [[prompt.environment for prompt in each.draw(request(6))] for each in (first, second)]
    assert tasks[0] == tasks[1]
    assert tasks[0].count("b") == 2, "one of the next five, and the one that was lost"


def test_a_checkpoint_of_a_random_mix_is_continued_with_exact_shares():
    mix = Mix({"a": 2, "b": 1}, shares="drawn")
    mix.load_state_dict(Mix({"a": 2, "b": 1}).state_dict())
    assert Counter(mix.choose(["a", "b"], request(6))) == {"a": 4, "b": 2}


@pytest.mark.parametrize("sampler", [Mix, Curriculum])
@pytest.mark.parametrize(
    ("state", "said"),
    [
        (["drawn"], 'it is ["drawn"]; expected a table'),
        ({}, "drawn is null; expected a whole number of at least 0"),
        ({"drawn": 3, "quotas": {"a": 1}}, "quotas.owed is null; expected a value; the key is missing"),
        (
            {"drawn": 3, "quotas": {"owed": {}}},
            "quotas.lost is null; expected a value; the key is missing",
        ),
    ],
)
def test_a_state_that_lacks_what_was_saved_is_refused(sampler, state, said):
    with pytest.raises(CheckpointError, match=re.escape(said)):
        load_plugin_state(sampler(shares="drawn"), "sampler 'mix'", state)


def test_tasks_that_are_owed_the_same_take_turns_in_spite_of_rounding():
    quotas, weights = Quotas({}, []), {"long": 1, "ranked": 1, "short": 4}
    steps = [Counter(quotas.divide(weights, 8)) for _ in range(300)]
    assert [(step["long"], step["ranked"]) for step in steps[:3]] == [(2, 1), (1, 2), (1, 1)]
    assert steps == steps[:3] * 100
