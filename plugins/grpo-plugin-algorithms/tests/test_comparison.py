"""Comparisons of two versions on the same prompts are valid at every time."""

from __future__ import annotations

import json
import random
from hashlib import sha256

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from grpo_core import ConfigError, Prompt, Rollout
from grpo_core.testing import run
from grpo_plugin_algorithms.comparison import Comparison
from grpo_plugin_algorithms.paired import Paired


def watched(differences, every=16, **options):
    """Look after every few differences; return the first decision and how many were needed."""
    comparison = Comparison(**options)
    for begin in range(0, len(differences), every):
        comparison.add(differences[begin : begin + every])
        if comparison.decision:
            break
    return comparison.decision, comparison.n


def pairs(rng, n, *, effect=0.0, discordant=0.2):
    """Differences of right and wrong replies, of which a share differs between the versions."""
    better, worse = (discordant + effect) / 2, (discordant - effect) / 2
    return rng.choice([1.0, -1.0, 0.0], n, p=[better, worse, 1 - better - worse])


@pytest.mark.long
def test_equal_versions_are_rarely_told_apart_however_often_one_looks():
    rng = np.random.default_rng(1)
    wrong = sum(watched(pairs(rng, 1568))[0] is not None for _ in range(40))
    assert wrong <= 5, "two are expected; the benchmark counts 10,000"


@pytest.mark.long
def test_a_difference_of_five_points_is_found_with_half_the_prompts_of_two_independent_samples():
    """Two samples of 1568 find it with a power of 80% (two-sided, 5%)."""
    rng = np.random.default_rng(2)
    found = [watched(pairs(rng, 1568, effect=0.05)) for _ in range(60)]
    assert sum(decision == "better" for decision, _ in found) / 60 >= 0.8
    assert sum(n for _, n in found) / 60 <= 1568 / 2
    assert {decision for decision, _ in found} <= {"better", None}


def test_versions_that_never_differ_are_equal_within_a_margin():
    decision, n = watched([0.0] * 2000, margin=0.02)
    assert decision == "equal"
    assert n < 1000
    assert watched([0.0] * 2000)[0] is None


@given(st.lists(st.floats(-1, 1), max_size=60), st.floats(0.01, 0.5))
def test_an_interval_only_shrinks_and_holds_the_mean_or_is_gone(differences, effect):
    comparison = Comparison(effect=effect)
    before = comparison.interval
    assert before == (-1.0, 1.0)
    for difference in differences:
        comparison.add([difference])
        low, high = comparison.interval
        assert (low, high) == (comparison.mean, comparison.mean) or (before[0] <= low <= high <= before[1])
        before = low, high
    negated = Comparison(effect=effect)
    negated.add(-difference for difference in differences)
    assert negated.interval == pytest.approx(tuple(-end for end in reversed(comparison.interval)))


@pytest.mark.parametrize("wrong", [{"bound": 0.0}, {"confidence": 1.0}, {"effect": 2.0}, {"margin": -1.0}])
def test_numbers_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="expected bound > 0"):
        Comparison(**wrong)
    with pytest.raises(ValueError, match=r"difference 1.5 exceeds the bound 1.0"):
        Comparison().add([1.5])


# ---------------------------------------------------------------------------------- the strategy


class Context:
    """Versions whose share of right replies is known; counts what is played."""

    def __init__(self, shares, n=1200):
        self.shares, self.version, self.played = shares, 0, []
        self.prompts = {"sort": [Prompt(messages=str(i), id=str(i), environment="sort") for i in range(n)]}

    async def rollout(self, prompts, *, n, temperature, max_tokens, mode):
        self.played += [prompt.id for prompt in prompts]
        right = [random.Random(prompt.id).random() < self.shares[self.version] for prompt in prompts]
        return [Rollout(reward=float(each), success=each) for each in right]


def validated(strategy, context, version):
    context.version, context.played = version, []
    return run(strategy.validate(context))["sort"]


def test_a_worse_version_is_not_played_to_the_end_and_a_better_one_becomes_the_standard():
    strategy, context = Paired(), Context([0.5, 0.4, 0.6, 0.6])
    assert "difference" not in validated(strategy, context, 0)
    assert len(context.played) == 1200
    worse = validated(strategy, context, 1)
    assert worse["outcome"] == -1.0
    assert worse["difference_low"] < worse["difference"] < worse["difference_high"] < 0
    assert worse["prompts"] == len(context.played) < 600
    better = validated(strategy, context, 2)
    assert (better["outcome"], better["standard"], better["prompts"]) == (1.0, 0.0, 1200.0)
    same = validated(strategy, context, 3)
    assert (same["outcome"], same["standard"]) == (0.0, 2.0)
    assert same["prompts"] < 1200


def test_a_version_that_is_not_certainly_better_does_not_become_the_standard():
    """Otherwise the bar drifts: each version would be compared with the one before, however bad that was."""
    strategy, context = Paired(), Context([0.5, 0.51, 0.5], n=100)
    validated(strategy, context, 0)
    for version in (1, 2):
        undecided = validated(strategy, context, version)
        assert "outcome" not in undecided
        assert undecided["standard"] == 0.0


class EasyFirst(Context):
    """Prompts that are played first are easier; the second version solves only these, and not all of them."""

    async def rollout(self, prompts, **_):
        order = [prompt.id for prompt in sorted(self.prompts["sort"], key=place)]
        at = [order.index(prompt.id) for prompt in prompts]
        if self.version == 0:
            right = [each < 600 or each % 2 == 0 for each in at]
        else:
            right = [each < 600 and each % 6 != 0 for each in at]
        self.played += [prompt.id for prompt in prompts]
        return [Rollout(reward=float(each), success=each) for each in right]


def place(prompt):
    return sha256(prompt.id.encode()).digest()


def test_a_version_that_is_left_early_looks_no_better_for_the_prompts_that_it_was_spared():
    strategy, context = Paired(), EasyFirst([])
    first, worse = (validated(strategy, context, version) for version in (0, 1))
    assert first["accuracy"] == 0.75
    assert len(context.played) < 600, "it is left where 5 of 6 replies are right"
    assert worse["accuracy"] == pytest.approx(0.75 + worse["difference"])
    assert worse["accuracy_low"] < worse["accuracy"] < worse["accuracy_high"] < 0.75
    assert worse["reward"] == pytest.approx(worse["accuracy"])


def test_the_standard_survives_as_json_and_the_next_version_is_compared_with_it():
    first, context = Paired(), Context([0.4, 0.6, 0.6])
    validated(first, context, 0)
    validated(first, context, 1)
    state = json.loads(json.dumps(first.state_dict()))
    assert state["sort"]["version"] == 1
    resumed = Paired()
    resumed.load_state_dict(state)
    found, expected = (validated(each, context, 2) for each in (resumed, first))
    assert found == expected
    assert found["standard"] == 1.0
    assert resumed.state_dict() == first.state_dict()


@pytest.mark.parametrize("key", ["version", "scores", "missing"])
def test_a_saved_standard_that_lacks_a_key_is_refused(key):
    standard = {"version": 0, "scores": {"1": {"reward": 1.0}}, "missing": {}}
    del standard[key]
    with pytest.raises(ValueError, match=f"sort.{key} is null; expected a value; the key is missing"):
        Paired().load_state_dict({"sort": standard})


class Lacking(Context):
    """A judge times out for most of the wrong replies of later versions."""

    lacks = 0.8

    async def rollout(self, prompts, **asked):
        rollouts = await super().rollout(prompts, **asked)
        gone = [random.Random(f"gone {prompt.id}").random() < self.lacks for prompt in prompts]
        return [
            Rollout(error="judge: timeout") if self.version and each.reward == 0.0 and lost else each
            for each, lost in zip(rollouts, gone, strict=True)
        ]


def test_missing_scores_make_no_version_better():
    """The share of successes among the scores rises from 70% to 92%; the others may be failures, and are."""
    strategy, context = Paired(until="all"), Lacking([0.7, 0.7, 0.95], n=600)
    validated(strategy, context, 0)
    same = validated(strategy, context, 1)
    assert "outcome" not in same
    assert same["difference_low"] < 0 < 0.2 < same["difference_high"]
    assert "accuracy" not in same
    assert same["accuracy_low"] < 0.7 < same["accuracy_high"]
    assert strategy.state_dict()["sort"]["version"] == 0
    context.lacks = 0.3  # of a much better version 2% are missing
    better = validated(strategy, context, 2)
    assert (better["outcome"], better["standard"]) == (1.0, 0.0)
    state = json.loads(json.dumps(strategy.state_dict()))["sort"]
    assert state["version"] == 2
    assert set(state["missing"].values()) == {1.0}
    assert 0 < len(state["missing"]) < 30


def test_the_first_version_is_not_the_standard_if_it_lacks_many_scores():
    strategy, context = Paired(), Lacking([0.7, 0.7], n=100)
    context.lacks = 1.0
    assert "accuracy" not in validated(strategy, context, 1)
    assert strategy.state_dict() == {}


def test_without_a_declared_success_a_missing_reward_may_be_anything_within_the_bound():
    class Rewards(Lacking):
        async def rollout(self, prompts, **asked):
            return [evolve(each, success=None) for each in await super().rollout(prompts, **asked)]

    strategy, context = Paired(until="all"), Rewards([0.7, 0.7], n=300)
    validated(strategy, context, 0)
    found = validated(strategy, context, 1)
    assert "outcome" not in found
    assert found["difference_low"] < -0.1 < 0.1 < found["difference_high"]


def test_all_prompts_are_played_if_one_wants_them():
    strategy, context = Paired(until="all"), Context([0.5, 0.4])
    validated(strategy, context, 0)
    assert validated(strategy, context, 1)["prompts"] == 1200


def test_scores_beyond_the_bound_name_the_option():
    class Large(Context):
        async def rollout(self, prompts, **_):
            return [Rollout(reward=10.0 * self.version) for _ in prompts]

    strategy, context = Paired(), Large([])
    validated(strategy, context, 0)
    expected = r"task 'sort': difference 10.0 exceeds .* set validation.options.bound"
    with pytest.raises(ConfigError, match=expected):
        validated(strategy, context, 1)


@pytest.mark.parametrize("wrong", [{"until": "soon"}, {"batch": 0}, {"effect": 0.0}])
def test_options_out_of_range_are_refused(wrong):
    with pytest.raises(ConfigError, match="expected"):
        Paired(**wrong)
