"""Shaping: what advantages compare, while everything else keeps the original rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from grpo_core import rewards as formulas
from grpo_core.app import making
from grpo_core.config import build
from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.contracts.records import Rollout, Segment
from grpo_core.contracts.tokens import Tokens
from grpo_core.loop import rows
from grpo_core.loop.rows import shaped_rewards, with_advantages
from grpo_core.plugins.host import PluginHost
from grpo_plugin_algorithms.shaping import Shaping, ShapingConfig
from grpo_plugin_devkit.objectives import a_group

FILE = Path(__file__).parents[3] / "tests" / "vectors" / "nemo_rl_advantages.json"
NEMO = json.loads(FILE.read_text())["rewards"]


def of_kind(kind: str) -> dict[str, Any]:
    return next(case for case in NEMO if case["kind"] == kind)


def test_scaled_rewards_are_those_of_nemo_rl() -> None:
    case = of_kind("scale")
    source = [case["config"]["source_min"], case["config"]["source_max"]]
    target = [case["config"]["target_min"], case["config"]["target_max"]]
    found = [formulas.scaled(reward, source, target) for reward in case["rewards"]]
    assert found == pytest.approx(case["out"], abs=1e-6)


def test_overlong_penalties_are_those_of_nemo_rl() -> None:
    case = of_kind("shape")
    limit = case["config"]["max_response_length"]
    buffer, penalty = case["config"]["overlong_buffer_length"], case["config"]["overlong_buffer_penalty"]
    found = [
        reward + formulas.overlong(n, limit=limit, buffer=buffer, penalty=penalty, bounded=False)
        for reward, n in zip(case["rewards"], case["lengths"], strict=True)
    ]
    assert found == pytest.approx(case["out"], abs=1e-6)


def test_the_overlong_penalty_rises_over_its_buffer_and_stays_whole() -> None:
    found = [formulas.overlong(n, limit=100, buffer=20, penalty=0.5) for n in (10, 80, 85, 100, 300)]
    assert found == [0.0, 0.0, -0.125, -0.5, -0.5]


def shaping_by(**keys: Any) -> Shaping:
    return Shaping(ShapingConfig(**keys))


def test_shaping_has_the_order_of_its_keys() -> None:
    given = a_group([0.5, 2.0], lengths=(4, 8))  # the longest was cut off
    shaping = shaping_by(
        source=(0.0, 1.0), target=(0.0, 10.0), truncated_factor=0.5, token_price=0.1,
        overlong_limit=8, overlong_buffer=4, overlong_penalty=2.0,
    )  # fmt: skip
    assert shaping([given])[0].rewards == pytest.approx([5.0 - 0.4, 10.0 * 0.5 - 0.8 - 2.0])


def test_the_reward_may_be_a_weighted_sum_of_its_parts() -> None:
    given = a_group([0.5])
    given = evolve(given, rollouts=(evolve(given.rollouts[0], metrics={"right": 1.0, "short": 0.5}),))
    shaped = shaping_by(weights={"right": 2.0, "short": -1.0})([given])
    assert shaped[0].rewards == [1.5]
    with pytest.raises(PluginError, match=r"shaping.weights: prompt .* has no metric polite; .* \['right'"):
        shaping_by(weights={"polite": 1.0})([given])


def test_a_rollout_whose_paid_part_is_not_a_number_is_unscored_and_another_metric_changes_nothing() -> None:
    one = evolve(a_group([0.5]).rollouts[0], metrics={"right": 1.0}, left_out={"short": "nan"})
    found = shaping_by(weights={"right": 1.0, "short": -1.0}).checked(one)
    assert (found.reward, found.error) == (
        None,
        "shaping.weights uses 'short', which is nan, expected a finite number",
    )
    assert shaping_by(weights={"right": 1.0}).checked(one) is one


def test_an_unscored_rollout_stays_unscored() -> None:
    given = a_group([1.0, 0.0])
    given = evolve(given, rollouts=(evolve(given.rollouts[0], reward=None), given.rollouts[1]))
    assert shaping_by(token_price=1.0)([given])[0].rewards[0] is None
    assert shaped_rewards([given]) == {"shaped_reward/task": 0.0}


def test_what_shaping_adds_belongs_to_the_last_turn() -> None:
    given = a_group([1.0])
    rollout = evolve(given.rollouts[0], turn_rewards=(0.25, 0.75), turn_tokens=(1, 2))
    shaped = shaping_by(token_price=1.0)([evolve(given, rollouts=(rollout,))])[0].rollouts[0]
    assert (shaped.reward, shaped.turn_rewards) == (-2.0, (0.25, -2.25))


@given(st.lists(st.integers(0, 4).map(float), min_size=2, max_size=6))
def test_advantages_compare_shaped_rewards_and_the_groups_keep_theirs(values: list[float]) -> None:
    given, shaping = a_group(values), shaping_by(token_price=0.5)
    found = with_advantages([given], rows.group, shaping=shaping)[0]
    assert found.rewards == values
    assert [rollout.advantage for rollout in found.rollouts] == rows.group(shaping([given]))[0]


# ---------------------------------------------------------------------------------- configuration


def made(**keys: Any) -> Shaping | None:
    host = PluginHost.discover(["algorithms"])
    config = build([{"shaping": keys, "rollout": {"max_tokens": 100}}], host.sections)
    return making.shaping_of(config, host)


def test_the_default_section_shapes_nothing() -> None:
    assert made() is None
    assert ShapingConfig().reward_shaping(100) is None


def test_the_limit_of_tokens_is_where_the_penalty_is_whole() -> None:
    shaping = made(overlong_buffer=20)
    assert shaping is not None
    lengths = (80, 90, 100, 150)
    assert shaping([a_group([1.0] * 4, lengths=lengths)])[0].rewards == [1.0, 0.5, 0.0, 0.0]


@pytest.mark.parametrize(("turns", "expected"), [(1, 0.0), (4, 1.0)])
def test_each_turn_of_a_rollout_may_have_as_many_tokens_as_a_completion(turns: int, expected: float) -> None:
    shaping = made(overlong_buffer=20)
    assert shaping is not None
    tokens = Tokens.generated([7] * 200, [-1.0] * 200, [0] * 200)
    rollout = Rollout(reward=1.0, segments=(Segment(prompt_ids=(1,), tokens=tokens),), turns=turns)
    assert shaping([evolve(a_group([1.0]), rollouts=(rollout,))])[0].rewards == [expected]


def test_a_source_alone_clips() -> None:
    shaping = made(source=[-1, 1])
    assert shaping is not None
    assert shaping([a_group([3.0, 0.5])])[0].rewards == [1.0, 0.5]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": [1, 0]}, r"'source' must be \[low, high\] with low < high: \[1.0, 0.0\]"),
        ({"target": [0, 1]}, r"shaping\.target needs shaping\.source"),
        ({"overlong_buffer": 101}, "overlong_buffer is 101; expected at most .* which is 100"),
        ({"truncated_factor": 2}, "truncated_factor"),
        ({"weights": {"a": "b"}}, "expected a number, got 'b'"),
    ],
)
def test_a_section_that_cannot_be_meant_is_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        made(**keys)
