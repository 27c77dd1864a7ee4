"""Learnable: most of the tasks whose rollouts differ, and the sampler contract."""

import pytest

import grpo_core as grpo
from grpo_core.kit import PluginHost
from grpo_plugin_curriculum.curriculum import Learnable
from grpo_plugin_devkit.samplers import check_sampler

REQUEST = grpo.SampleRequest(generation_version=0, target_version=0, current_version=0, expected_prompts=1)


def group(task, *rewards):
    return grpo.Group(
        prompt=grpo.Prompt(messages="x", environment=task),
        rollouts=tuple(grpo.Rollout(reward=reward) for reward in rewards),
        generation_version=0,
        target_version=0,
    )


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"memory": 0.0}, {"floor": 1.0}, {"weights": {"a": 0}}])
def test_it_keeps_the_contract(options):
    check_sampler(lambda: Learnable(**options), examples=60)


def test_an_unscored_rollout_is_not_a_failure():
    sampler = Learnable(memory=0.0)
    sampler.observe([group("lacking", 1, None), group("solved", 1, 1), group("unknown", None, None)])
    lacking, solved, unknown = sampler.weights(["lacking", "solved", "unknown"], REQUEST)
    assert lacking == solved < unknown


def test_a_task_that_is_half_solved_has_the_most_weight():
    sampler = Learnable(floor=0.1, memory=0.0)
    sampler.observe(
        [group("easy", 1, 1), group("hard", 0, 0), group("half", 0, 1), group("some", 0, 0, 0, 1)]
    )
    assert sampler.weights(["easy", "half", "hard", "some", "unknown"], REQUEST) == pytest.approx(
        [0.1, 1.0, 0.1, 0.1 + 0.9 * 0.75, 1.0]
    )


@pytest.mark.parametrize(("success", "weight"), [(None, 0.75), (0.0, 0.0), (0.7, 1.0)])
def test_success_is_what_a_task_declares_unless_the_sampler_says_otherwise(success, weight):
    rewards = (0.5, 0.6, 0.7, 0.8)
    rollouts = [grpo.Rollout(reward=r, success=r >= 0.8) for r in rewards]
    given = grpo.Group(
        prompt=grpo.Prompt(messages="x", environment="a"),
        rollouts=tuple(rollouts),
        generation_version=0,
        target_version=0,
    )
    sampler = Learnable(floor=0.001, memory=0.0, success=success)
    sampler.observe([given])
    assert sampler.weights(["a"], REQUEST) == pytest.approx([weight], abs=0.002)


def test_it_moves_gradually():
    sampler = Learnable(memory=0.9)
    seen = []
    for _ in range(30):
        sampler.observe([group("easy", 1, 1)])
        seen += sampler.weights(["easy"], REQUEST)
    assert seen == sorted(seen, reverse=True)
    assert seen[0] > 0.95
    assert seen[-1] < 0.3


def test_it_is_offered_by_name():
    assert PluginHost.discover(["curriculum"]).factory("sampler", "learnable") is Learnable


@pytest.mark.parametrize("options", [{"floor": 0}, {"memory": 1.0}])
def test_numbers_out_of_range_are_refused(options):
    with pytest.raises(grpo.ConfigError, match="sampler learnable: expected 0 < floor <= 1"):
        Learnable(**options)
