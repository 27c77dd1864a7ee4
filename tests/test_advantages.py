"""Advantages: relative to the group, and to nothing else."""

import math
from typing import Any

import pytest
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from grpo_core.contracts.advantages import equal, normalize
from grpo_core.loop import rows
from grpo_core.loop.dynamic import DynamicSampling
from grpo_core.loop.metrics import task_metrics
from grpo_plugin_devkit.objectives import a_group, check_advantage

rewards = st.integers(-40, 40).map(lambda eighths: eighths / 8)
one_group = st.lists(rewards, min_size=2, max_size=16)
scales = st.sampled_from(["group", "none"])


def group(rewards: list[list[float]], **options: Any) -> list[list[float]]:
    return [normalize(each, **options) for each in rewards]


def close(a: list[float], b: list[float]) -> bool:
    return a == pytest.approx(b, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "given_rewards", "expected"),
    [
        ({}, [1, 3], [-0.70710678, 0.70710678]),
        ({}, [1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        ({}, [1, 1, 0, 0], [0.8660254, 0.8660254, -0.8660254, -0.8660254]),
        ({"leave_one_out": True}, [1, 1, 0, 0], [1.15470054, 1.15470054, -1.15470054, -1.15470054]),
        ({"scale": "none"}, [1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
        ({"scale": "none", "leave_one_out": True}, [1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]),
        ({}, [0, 1, 2, 3], [-1.16189500, -0.38729833, 0.38729833, 1.16189500]),
    ],
)
def test_known_groups(options: dict, given_rewards: list, expected: list) -> None:
    assert group([given_rewards], **options) == [pytest.approx(expected)]


@pytest.mark.parametrize("leave_one_out", [False, True])
@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, 0.35, 5.0, 1e-9, -1e12])
def test_equal_rewards_teach_nothing_exactly(value: float, leave_one_out: bool) -> None:
    assert group([[value] * 8, [value]], leave_one_out=leave_one_out) == [[0.0] * 8, [0.0]]


def test_noise_in_the_last_digits_counts_as_equal_rewards() -> None:
    noisy = [math.fsum([0.1] * 3), 0.1 + 0.1 + 0.1, 0.3, 0.3 + 1e-8]
    assert group([noisy]) == [[0.0] * 4]


def test_a_small_difference_is_a_signal_however_the_group_is_large() -> None:
    assert group([[0.3] * 7 + [0.35]])[0][-1] == pytest.approx(7 / math.sqrt(8))


@given(one_group, rewards, scales, st.booleans())
def test_shifting_all_rewards_changes_no_advantage(
    values: list[float], shift: float, scale: str, leave_one_out: bool
) -> None:
    shifted = [value + shift for value in values]
    options = {"scale": scale, "leave_one_out": leave_one_out}
    assert close(group([values], **options)[0], group([shifted], **options)[0])


@given(st.data(), one_group, scales, st.booleans())
def test_permuting_a_group_permutes_its_advantages(
    data: st.DataObject, values: list[float], scale: str, leave_one_out: bool
) -> None:
    order = data.draw(st.permutations(range(len(values))))
    options = {"scale": scale, "leave_one_out": leave_one_out}
    straight = group([values], **options)[0]
    assert close(group([[values[i] for i in order]], **options)[0], [straight[i] for i in order])


@given(one_group, st.floats(1e-3, 1e3))
def test_scaled_advantages_do_not_depend_on_the_unit_of_rewards(values: list[float], unit: float) -> None:
    assert close(group([values])[0], group([[unit * value for value in values]])[0])


@given(one_group, scales, st.booleans())
def test_advantages_of_a_group_sum_to_zero_and_are_bounded(
    values: list[float], scale: str, leave_one_out: bool
) -> None:
    found = group([values], scale=scale, leave_one_out=leave_one_out)[0]
    assert math.fsum(found) == pytest.approx(0, abs=1e-9)
    if scale == "group" and not leave_one_out:
        assert max(map(abs, found)) <= (len(values) - 1) / math.sqrt(len(values)) + 1e-9


@pytest.mark.long
@given(st.lists(one_group, min_size=1, max_size=4), scales)
def test_groups_do_not_influence_each_other(groups: list[list[float]], scale: str) -> None:
    assert group(groups, scale=scale) == [group([each], scale=scale)[0] for each in groups]


@given(one_group, scales, st.booleans())
def test_a_better_reward_never_has_a_lower_advantage(
    values: list[float], scale: str, leave_one_out: bool
) -> None:
    assume(max(values) > min(values))
    found = group([values], scale=scale, leave_one_out=leave_one_out)[0]
    ranked = [a for _, a in sorted(zip(values, found, strict=True))]
    assert ranked == sorted(ranked)
    assert ranked[-1] > ranked[0]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match=r"rewards are not finite: \[(nan|inf), 1.0\]"):
        group([[0.0, 1.0], [bad, 1.0]])


def test_an_unknown_scale_is_refused() -> None:
    with pytest.raises(ValueError, match="'batch'; expected 'group' or 'others' or 'none'"):
        group([[0.0, 1.0]], scale="batch")  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------- of groups


def test_the_built_in_function_normalizes_each_group_by_itself() -> None:
    groups = [a_group([0.0, 1.0, 1.0, 1.0]), a_group([5.0, 3.0])]
    expected = [normalize(each, scale="none") for each in ([0.0, 1.0, 1.0, 1.0], [5.0, 3.0])]
    assert rows.group(groups, scale="none") == expected


def test_a_rollout_without_a_reward_is_masked() -> None:
    given = a_group([0.0, 1.0, 1.0])
    first, *others = given.rollouts
    unscored = evolve(given, rollouts=(evolve(first, reward=None), *others))
    assert rows.group([unscored]) == [[None, 0.0, 0.0]]


def test_both_keep_the_contract_of_an_advantage_function() -> None:
    for options in ({}, {"scale": "none"}, {"leave_one_out": True}):
        check_advantage(rows.group, **options)


@given(st.lists(st.one_of(rewards, st.floats(-1e6, 1e6)), min_size=2, max_size=6))
def test_equal_rewards_mean_the_same_to_advantages_dynamic_sampling_and_metrics(values: list[float]) -> None:
    one = a_group(values)
    without_advantages = not any(rows.group([one])[0])
    assert equal(values) is without_advantages
    assert (DynamicSampling(max_extra_groups=9).rejects(one) is None) is not without_advantages
    assert task_metrics([one], step=0)["frac_reward_zero_std/task"] == float(without_advantages)
