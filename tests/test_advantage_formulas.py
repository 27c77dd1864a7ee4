"""Formulas of advantages: against numbers of other libraries, against their definitions, and their laws."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from grpo_core import advantages as formulas
from grpo_core.app import making
from grpo_core.config import build
from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.loop import rows
from grpo_core.loop.rows import Clipped
from grpo_core.plugins.host import PluginHost
from grpo_plugin_algorithms import advantages as methods
from grpo_plugin_algorithms import formulas as further
from grpo_plugin_devkit.objectives import a_group, check_advantage

NEMO = json.loads((Path(__file__).parent / "vectors" / "nemo_rl_advantages.json").read_text())
CANCELLED = {"grpo_small_var_looTrue_normTrue"}
"""Cases in which float32 has lost the variance: the mean of squares less the square of the mean."""

rewards = st.integers(-40, 40).map(lambda eighths: eighths / 8)
steps = st.lists(st.lists(rewards, min_size=2, max_size=6), min_size=1, max_size=4)


def by_group(case: dict[str, Any], values: Sequence[Any]) -> list[list[Any]]:
    pairs = list(zip(case["groups"], values, strict=True))
    return [[value for of, value in pairs if of == place] for place in sorted(set(case["groups"]))]


def kl(policy: float, reference: float) -> float:
    return math.exp(reference - policy) - (reference - policy) - 1


def ours(case: dict[str, Any]) -> list[list[float]]:
    """The advantages of each token of each rollout, in the order of the case."""
    config, lengths = case["config"], case["lengths"]
    rewards = by_group(case, case["rewards"])
    if config["name"] == "grpo":
        leave_one_out = config["use_leave_one_out_baseline"]
        scale: Any = ("others" if leave_one_out else "group") if config["normalize_rewards"] else "none"
        found = formulas.group(rewards, scale=scale, leave_one_out=leave_one_out, epsilon=1e-6)
    elif config["use_kl_in_reward"]:
        return with_kl(case)
    else:
        found = further.reinforce_plus_plus(
            rewards, lengths=by_group(case, lengths), baseline=config["minus_baseline"]
        )
    return [[value] * n for value, n in zip(in_order(case, found), lengths, strict=True)]


def with_kl(case: dict[str, Any]) -> list[list[float]]:
    """REINFORCE++ with the KL of each token in its reward."""
    rewards = by_group(case, case["rewards"])
    centred = formulas.group(rewards, scale="none") if case["config"]["minus_baseline"] else rewards
    price, logprobs = case["config"]["reference_policy_kl_penalty"], case["logprobs"]
    return further.whiten([
        [value - price * kl(policy[t], reference[t]) for t in range(n)]
        for value, policy, reference, n in zip(
            in_order(case, centred), logprobs["logprobs_policy"], logprobs["logprobs_reference"],
            case["lengths"], strict=True,
        )
    ])  # fmt: skip


def in_order(case: dict[str, Any], found: list[list[Any]]) -> list[Any]:
    iterators = [iter(row) for row in found]
    return [next(iterators[place]) for place in case["groups"]]


@pytest.mark.parametrize(
    "case",
    [
        case
        for case in NEMO["advantages"]
        if case["name"] not in CANCELLED and case["config"]["name"] != "opd"
    ],
    ids=lambda case: case["name"],
)
def test_formulas_give_the_numbers_of_nemo_rl(case: dict[str, Any]) -> None:
    for found, expected, n in zip(ours(case), case["advantages"], case["lengths"], strict=True):
        assert found == pytest.approx(expected[:n], abs=1e-6)


@pytest.mark.parametrize("name", sorted(CANCELLED))
def test_where_the_numbers_differ_float32_has_lost_the_variance(name: str) -> None:
    case = next(case for case in NEMO["advantages"] if case["name"] == name)
    rewards = np.array(case["rewards"][:4], np.float32)
    others = np.delete(rewards, 1)
    lost = (np.mean(others * others) - np.mean(others) ** 2) * np.float32(1.5)
    kept = np.var(others.astype(np.float64), ddof=1)
    assert math.sqrt(max(lost, 0)) > 3 * math.sqrt(kept)
    found = (float(rewards[1]) - float(others.astype(np.float64).mean())) / (math.sqrt(kept) + 1e-6)
    assert ours(case)[1][0] == pytest.approx(found, rel=1e-5)


@pytest.mark.parametrize("case", NEMO["baselines"], ids=["binary", "leave-one-out", "small"])
def test_baselines_and_deviations_are_those_of_nemo_rl(case: dict[str, Any]) -> None:
    """Where float32 has lost a small variance, NeMo RL's deviation is 0."""
    rewards, alone = by_group(case, case["rewards"]), case["leave_one_out"]
    scale: Any = "others" if alone else "group"
    centred, scaled = (
        in_order(case, formulas.group(rewards, scale=kind, leave_one_out=alone)) for kind in ("none", scale)
    )
    assert len(case["rewards"]) == len(case["baseline"]) == len(case["std"]) == 8
    for i, (difference, ratio) in enumerate(zip(centred, scaled, strict=True)):
        deviation = difference / ratio if ratio else 0.0
        assert case["rewards"][i] - difference == pytest.approx(case["baseline"][i], abs=1e-6)
        assert deviation == pytest.approx(case["std"][i], abs=1e-6 if case["std"][i] else 1e-4)


# ---------------------------------------------------------------------------------- TRL's conventions


def trl(rewards: list[list[float]], scale: str) -> list[list[float]]:
    """``scale_rewards`` of TRL: deviations of a sample, plus 1e-4."""
    rows = np.array(rewards)
    centred = rows - rows.mean(axis=1, keepdims=True)
    if scale == "group":
        return (centred / (rows.std(axis=1, ddof=1, keepdims=True) + 1e-4)).tolist()
    return (centred / (rows.std(ddof=1) + 1e-4) if scale == "batch" else centred).tolist()


@pytest.mark.long
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@given(st.lists(st.lists(rewards, min_size=4, max_size=4), min_size=1, max_size=4))
def test_ddof_and_epsilon_express_the_scales_of_trl(scale: Any, step: list[list[float]]) -> None:
    found = formulas.group(step, scale=scale, epsilon=1e-4)
    for row, expected in zip(found, trl(step, scale), strict=True):
        assert row == pytest.approx(expected, abs=1e-9)


@pytest.mark.long
@given(st.lists(st.lists(st.tuples(rewards, rewards), min_size=4, max_size=4), min_size=1, max_size=3))
def test_gdpo_with_two_epsilons_is_normalize_then_sum_of_trl(step: list[list[tuple[float, float]]]) -> None:
    weights = np.array([1.0, 0.5])
    rows = np.array(step)
    parts = (rows - rows.mean(axis=1, keepdims=True)) / (rows.std(axis=1, ddof=1, keepdims=True) + 1e-4)
    sums = (parts * weights).sum(axis=2)
    expected = (sums - sums.mean()) / (sums.std(ddof=1) + 1e-4)
    given = [[{"a": a, "b": b} for a, b in row] for row in step]
    found = further.gdpo(given, weights={"a": 1.0, "b": 0.5}, epsilon=1e-4, batch_epsilon=1e-4)
    for row, row_expected in zip(found, expected.tolist(), strict=True):
        assert row == pytest.approx(row_expected, abs=1e-7)


@pytest.mark.long
@given(st.lists(st.lists(st.tuples(rewards, rewards), min_size=4, max_size=4), min_size=1, max_size=3))
def test_group_of_weighted_sums_is_sum_then_normalize_of_trl(step: list[list[tuple[float, float]]]) -> None:
    weights = {"a": 1.0, "b": 0.5}
    sums = [[a + 0.5 * b for a, b in row] for row in step]
    shaped = [[formulas.combine({"a": a, "b": b}, weights) for a, b in row] for row in step]
    found = formulas.group(shaped, epsilon=1e-4)
    for row, expected in zip(found, trl(sums, "group"), strict=True):
        assert row == pytest.approx(expected, abs=1e-9)


def test_the_asynchronous_trainer_of_trl_divides_by_the_populations_deviation() -> None:
    values = [1.0, 0.0, 0.0, 0.5]
    expected = (np.array(values) - np.mean(values)) / (np.std(values) + 1e-8)
    found = formulas.normalize(values, ddof=0, epsilon=1e-8)
    assert found == pytest.approx(expected.tolist(), abs=1e-12)


def test_a_weighted_sum_leaves_out_parts_without_a_reward() -> None:
    weights = {"a": 1.0, "b": 0.5}
    assert formulas.combine({"a": 2.0, "b": 4.0}, weights) == 4.0
    assert formulas.combine({"a": None, "b": 4.0}, weights) == 2.0
    assert formulas.combine({"a": None, "b": None}, weights) is None


# ---------------------------------------------------------------------------------- definitions


@pytest.mark.parametrize(("n", "k"), [(2, 1), (2, 2), (5, 1), (5, 2), (5, 4), (7, 2), (7, 4)])
def test_pass_at_k_is_the_mean_advantage_of_all_choices_of_k_rollouts(n: int, k: int) -> None:
    for right in range(n + 1):
        successes = [i < right for i in range(n)]
        choices = list(itertools.combinations(range(n), k))
        values = [float(any(successes[i] for i in choice)) for choice in choices]
        deviation = float(np.std(values))
        found = further.pass_at_k(successes, k)
        for i in range(n):
            mine = [v for choice, v in zip(choices, values, strict=True) if i in choice]
            expected = (np.mean(mine) - np.mean(values)) / deviation if deviation > 1e-12 else 0.0
            assert found[i] == pytest.approx(expected, abs=1e-12)


def test_pass_at_1_is_grpo_with_the_populations_deviation() -> None:
    successes = [True, False, False, True, False]
    expected = formulas.normalize([float(each) for each in successes], ddof=0)
    assert further.pass_at_k(successes, 1) == pytest.approx(expected)


def test_max_rl_weighs_a_rarely_solved_prompt_more() -> None:
    assert further.max_rl([1.0, 0.0, 0.0, 0.0]) == pytest.approx([3.0, -1.0, -1.0, -1.0])
    assert further.max_rl([1.0, 1.0, 1.0, 0.0]) == pytest.approx([1 / 3, 1 / 3, 1 / 3, -1.0])
    with pytest.raises(ValueError, match=r"rewards >= 0; got \[-1.0, 1.0\]"):
        further.max_rl([-1.0, 1.0])


def test_reinforce_plus_plus_weighs_a_rollout_with_its_tokens() -> None:
    step, lengths = [[1.0, 0.0], [0.5, 0.0]], [[3, 1], [2, 4]]
    tokens = np.repeat(np.ravel(step), np.ravel(lengths))
    found = further.reinforce_plus_plus(step, lengths=lengths, baseline=False)
    expected = (np.array(step) - tokens.mean()) / tokens.std()
    assert np.allclose(np.array(found), expected)


# ---------------------------------------------------------------------------------- laws

ALL = {
    "group": lambda step: formulas.group(step),
    "batch": lambda step: formulas.group(step, scale="batch", epsilon=1e-4),
    "others": lambda step: formulas.group(step, scale="others", leave_one_out=True),
    "reinforce_plus_plus": lambda step: further.reinforce_plus_plus(step),
    "gdpo": lambda step: further.gdpo([[{"a": r, "b": -2 * r} for r in row] for row in step]),
}


@pytest.mark.parametrize("name", ALL)
@given(steps)
def test_a_group_with_equal_rewards_has_exactly_no_advantages(name: str, step: list[list[float]]) -> None:
    found = ALL[name]([*step, [0.3] * 4, [0.1 + 0.2] * 3])
    unequal = [row for row in step if not formulas.equal(row)]
    if name != "gdpo" or not unequal:  # the sum over the step has the mean subtracted
        assert found[-2:] == [[0.0] * 4, [0.0] * 3]


@pytest.mark.parametrize("name", ALL)
@given(steps)
def test_a_reward_that_is_none_has_no_advantage_and_changes_no_other(
    name: str, step: list[list[float]]
) -> None:
    if name == "gdpo":
        return  # its parts are mappings
    with_none = ALL[name]([[*row, None] for row in step])
    assert with_none == [[*row, None] for row in ALL[name](step)]


@pytest.mark.parametrize("name", ALL)
@given(steps, st.integers(-16, 16))
def test_shifting_all_rewards_of_a_step_changes_no_advantage(
    name: str, step: list[list[float]], shift: int
) -> None:
    shifted = ALL[name]([[reward + shift for reward in row] for row in step])
    for row, other in zip(ALL[name](step), shifted, strict=True):
        assert row == pytest.approx(other, abs=1e-9)


def test_parts_that_are_none_do_not_count_in_the_means() -> None:
    parts = [[{"a": 1.0, "b": None}, {"a": 0.0, "b": 1.0}, {"a": None, "b": 0.0}, {"a": None, "b": None}]]
    found = further.gdpo(parts)
    assert found[0][3] is None
    assert sum(value for value in found[0] if value is not None) == pytest.approx(0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "median"}, "scale is 'median'; expected 'group', 'batch', 'others' or 'none'"),
        ({"ddof": 2}, "ddof is 2; expected 0 or 1"),
        ({"epsilon": -1.0}, "epsilon is -1.0; expected a finite number >= 0"),
    ],
)
def test_an_option_out_of_range_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        formulas.group([[0.0, 1.0]], **options)


# ---------------------------------------------------------------------------------- of groups


@pytest.mark.parametrize(
    "function",
    [
        rows.group,
        methods.reinforce_plus_plus,
        lambda groups: methods.reinforce_plus_plus(groups, baseline=False, count="rollouts"),
        lambda groups: rows.group(groups, scale="batch"),
        lambda groups: rows.group(groups, scale="others", leave_one_out=True, epsilon=1e-6),
        lambda groups: methods.pass_at_k(groups, k=2),
    ],
)
def test_every_function_keeps_the_contract(function: Any) -> None:
    check_advantage(function)


def with_parts(rewards: list[float], **parts: list[float]) -> Any:
    its = a_group(rewards)
    named = [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]
    rollouts = [evolve(one, metrics=metrics) for one, metrics in zip(its.rollouts, named, strict=True)]
    return evolve(its, rollouts=tuple(rollouts))


@pytest.mark.parametrize("count", ["tokens", "rollouts"])
@pytest.mark.parametrize("baseline", [True, False])
def test_what_a_configuration_counts_has_the_mean_0_and_the_variance_1(count: str, baseline: bool) -> None:
    """The tokens of a step, or its rollouts, whatever else is chosen."""
    given = {"name": "reinforce_plus_plus", "options": {"count": count, "baseline": baseline}}
    config, host = build([{"advantage": given}]), PluginHost.discover(["algorithms"])
    function = making.learning(config, making.loss(config.loss, host), host).advantages
    step = [a_group([1.0, 0.0, 0.5, 0.0]), a_group([0.0, 0.0, 1.0, 1.0], index=1)]
    found = [np.array(own, float) for own in function(step)]
    lengths = [[rollout.n_sampled if count == "tokens" else 1 for rollout in each.rollouts] for each in step]
    counted = np.repeat(np.concatenate(found), np.concatenate(lengths))
    assert (counted.mean(), counted.std()) == pytest.approx((0, 1), abs=1e-9)
    slopes = [np.polyfit(each.rewards, own, 1) for each, own in zip(step, found, strict=True)]
    means = [np.mean(each.rewards) if baseline else 0.0 for each in step]
    assert slopes[0][0] == pytest.approx(slopes[1][0])
    zeros = [slope[1] + slope[0] * mean for slope, mean in zip(slopes, means, strict=True)]
    assert zeros[0] == pytest.approx(zeros[1]), (
        "a reward at its group's mean has the same advantage everywhere"
    )


def test_gdpo_sees_the_parts_of_the_reward() -> None:
    its = with_parts([1.0, 1.0, 2.0], right=[0.0, 1.0, 1.0], short=[1.0, 0.0, 1.0])
    found = methods.gdpo([its], weights={"right": 1.0})
    assert found[0][0] < found[0][1] == pytest.approx(found[0][2])
    with pytest.raises(ValueError, match="has no metric left; its environment gives"):
        methods.gdpo([its], weights={"left": 1.0})


def test_gdpo_masks_a_rollout_whose_part_is_not_a_number() -> None:
    its = with_parts([1.0, 1.0, 2.0], right=[0.0, 1.0, 1.0])
    odd = evolve(its.rollouts[1], metrics={}, left_out={"right": "nan"})
    its = evolve(its, rollouts=(its.rollouts[0], odd, its.rollouts[2]))
    for weights in (None, {"right": 1.0}):
        first, second, third = methods.gdpo([its], weights=weights)[0]
        assert (first, second, third) == (pytest.approx(-third), None, pytest.approx(-first))


def test_max_rl_masks_a_rollout_without_a_reward() -> None:
    its = a_group([1.0, 0.0, 1.0])
    first, *rest = its.rollouts
    its = evolve(its, rollouts=(evolve(first, reward=None), *rest))
    assert methods.max_rl([its]) == [[None, -1.0, 1.0]]


def test_limits_clip_every_advantage_function() -> None:
    limited = Clipped(methods.max_rl, low=-0.5, high=2.0)
    assert limited([a_group([1.0, 0.0, 0.0, 0.0])]) == [[2.0, -0.5, -0.5, -0.5]]


# ---------------------------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("group", {"epsilon": -1.0}, "epsilon is -1.0; expected a finite number"),
        ("group", {"ddof": 3}, "ddof is 3; expected 0 or 1"),
        ("group", {"scale": "mean"}, "option 'scale' is 'mean'"),
        ("pass_at_k", {"k": 9}, r"k is 9; expected 1 to 8 \(rollout.group_size\)"),
        ("gdpo", {"batch_epsilon": math.inf}, "batch_epsilon is inf"),
        ("gdpo", {"weights": {"a": 1.0, "b": math.nan}}, r"weights\.b is nan; expected a finite number"),
        ("gigpo", {"weight": math.inf}, "weight is inf; expected a finite number"),
        ("gigpo", {"weight": -1.0}, "weight is -1.0; expected at least 0"),
        ("pass_at_k", {"success": math.nan}, "success is nan; expected a finite number"),
        ("group", {"epsilon": math.nan}, "epsilon is nan; expected a finite number"),
        ("turns", {"discount": math.nan}, "discount is nan; expected"),
        ("group", {"scale": "none", "epsilon": 0.1}, "epsilon does nothing with scale = 'none'"),
        ("group", {"scale": "none", "ddof": 0}, "ddof does nothing with scale = 'none'"),
        ("turns", {"scale": "none", "ddof": 0}, "ddof does nothing with scale = 'none'"),
        ("gigpo", {"scale": "none", "epsilon": 0.1}, "epsilon does nothing with scale = 'none'"),
        ("gdpo", {"scale": "none", "epsilon": 0.1}, "epsilon does nothing with scale = 'none'"),
    ],
)
def test_values_of_options_are_checked_before_a_run(name: str, options: dict, message: str) -> None:
    host = PluginHost.discover(allow=["algorithms"])

    def checked() -> None:
        host.check_options("advantage", name, options)
        host.check_values("advantage", name, options, group_size=8)

    with pytest.raises(PluginError, match=message):
        checked()


def test_the_deviation_of_the_step_has_a_ddof_whatever_divides_the_parts() -> None:
    options = {"scale": "none", "ddof": 0, "batch_epsilon": 0.1}
    PluginHost.discover(allow=["algorithms"]).check_values("advantage", "gdpo", options, group_size=8)
    parts = [[{"a": 1.0}, {"a": 0.0}, {"a": 0.0}]]
    assert further.gdpo(parts, scale="none", ddof=0) != further.gdpo(parts, scale="none", ddof=1)


def test_a_limit_that_would_give_equal_rewards_an_advantage_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'clip_low' must be <= 0: 0.5"):
        build([{"advantage": {"clip_low": 0.5}}])
    assert build([{"advantage": {"clip_low": -1.0, "clip_high": 4.0}}]).advantage.clip_high == 4.0
