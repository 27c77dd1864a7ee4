"""Credit by turn: from what the environment says of each turn to the advantage of each token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from test_turns import SAMPLING, played, scripted

import grpo_core as grpo
from grpo_core import advantages as formulas
from grpo_core.app.launch import configure
from grpo_core.app.make import make
from grpo_core.contracts.errors import PluginError
from grpo_core.contracts.records import Group, Rollout, Row, Segment
from grpo_core.contracts.tokens import Tokens
from grpo_core.loop import rows
from grpo_core.loop.rows import make_batch, with_advantages
from grpo_core.testing import HostedEnvironment
from grpo_core.training.microbatch import collate
from grpo_plugin_algorithms import advantages as methods
from grpo_plugin_algorithms import formulas as further
from grpo_plugin_devkit.objectives import a_group, check_advantage

rewards = st.integers(-8, 8).map(lambda quarters: quarters / 4)
games = st.lists(st.lists(rewards, min_size=1, max_size=4), min_size=2, max_size=5)


def a_rollout(turn_rewards: list[float], lengths: list[int], *, states: Any = ()) -> Rollout:
    """Turns of these lengths, each followed by an answer of two tokens."""
    parts = []
    for n in lengths:
        parts += [Tokens.generated([5] * n, [-1.0] * n, [0] * n), Tokens.context([7, 8])]
    return Rollout(
        segments=[Segment(prompt_ids=(1, 2), tokens=Tokens.concatenate(parts))],
        reward=math.fsum(turn_rewards),
        turns=len(lengths),
        turn_rewards=turn_rewards,
        turn_tokens=lengths,
        turn_states=states,
    )


def group_of(*rollouts: Rollout) -> Group:
    return evolve(a_group([0.0]), rollouts=rollouts)


def rows_of(*groups: Group, **options: Any) -> tuple[Row, ...]:
    def function(given: Any) -> Any:
        return methods.turns(given, **options)

    return make_batch(with_advantages(groups, function), step=0, temperature=1.0).rows


# ---------------------------------------------------------------------------------- the record


class Hops(grpo.Environment):
    """Three turns; the second one is worth a reward, and each leads to a named state."""

    max_turns = 3

    def prompts(self, split: str) -> list[grpo.Prompt]:
        return [grpo.Prompt(messages="go")]

    def evaluate(self, episodes: Any) -> list[grpo.Feedback]:
        return [
            grpo.Feedback(
                reward=(None, 2.0, 0.5)[episode.turn],
                done=episode.turn == 2,
                messages=() if episode.turn == 2 else "on",
                state=f"room {episode.turn}",
            )
            for episode in episodes
        ]


def test_a_rollout_knows_the_reward_the_tokens_and_the_state_of_each_turn() -> None:
    rollout = played(HostedEnvironment(Hops()), scripted("a", "bcd", "ef"))[0]
    assert rollout.reward == 2.5
    assert rollout.turn_rewards == (0.0, 2.0, 0.5)
    assert rollout.turn_states == ("room 0", "room 1", "room 2")
    assert sum(rollout.turn_tokens) == rollout.n_sampled
    assert len(rollout.turn_tokens) == rollout.turns == 3


def test_states_take_no_room_where_none_is_named() -> None:
    rollout = played(HostedEnvironment(Hops()), scripted("a"), sampling=evolve(SAMPLING, max_turns=1))[0]
    assert rollout.turn_states == ("room 0",)
    assert a_group([1.0]).rollouts[0].turn_states == ()


# ---------------------------------------------------------------------------------- formulas


@given(st.lists(rewards, max_size=6), st.floats(0, 1))
def test_a_return_is_the_sum_of_what_follows(values: list[float], discount: float) -> None:
    expected = [sum(r * discount**k for k, r in enumerate(values[t:])) for t in range(len(values))]
    assert further.returns(values, discount) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.lists(rewards, min_size=1, max_size=1), min_size=2, max_size=6))
def test_with_one_turn_credit_by_turn_is_grpo(game: list[list[float]]) -> None:
    (found,) = further.turns([game])
    assert [each for (each,) in found] == formulas.normalize([reward for (reward,) in game])  # type: ignore[misc]
    (found,) = further.gigpo([game], [[[None]] * len(game)])
    assert [each for (each,) in found] == formulas.normalize([reward for (reward,) in game])  # type: ignore[misc]


@given(games)
def test_credit_by_turn_sums_to_zero_over_the_turns_of_a_group(game: list[list[float]]) -> None:
    (found,) = further.turns([game], discount=0.9)
    assert math.fsum(value for row in found if row for value in row) == pytest.approx(0, abs=1e-9)


def test_a_turn_is_credited_with_what_follows_and_not_with_what_came_before() -> None:
    (found,) = further.turns([[[1.0, 0.0], [0.0, 0.0]]], scale="none")
    assert found == [[0.75, -0.25], [-0.25, -0.25]]


def test_gigpo_compares_turns_that_begin_in_the_same_state() -> None:
    rewards = [[0.0, 1.0], [0.0, 0.0], [0.0, 0.5]]
    states = [["", "hall"], ["", "hall"], ["", "attic"]]
    (found,) = further.gigpo([rewards], states=[states], discount=1.0, scale="none")
    whole = [0.5, -0.5, 0.0]
    assert [row[0] for row in found if row] == pytest.approx([2 * each for each in whole])
    assert [row[1] for row in found if row] == pytest.approx([0.5 + 0.5, -0.5 - 0.5, 0.0])


def test_the_discount_is_checked() -> None:
    with pytest.raises(ValueError, match=r"discount is 1\.5; expected 0 to 1"):
        further.turns([[[1.0]]], discount=1.5)


# ---------------------------------------------------------------------------------- rows


def test_one_advantage_of_a_rollout_replaces_those_of_its_turns() -> None:
    """The groups of a stored step have advantages already."""
    groups = [group_of(a_rollout([1.0, 0.0], [2, 3]), a_rollout([0.0, 0.0], [1, 1]))]
    by_turn = with_advantages(groups, methods.turns)
    assert by_turn[0].rollouts[0].token_advantages is not None
    assert with_advantages(by_turn, rows.group) == with_advantages(groups, rows.group)
    assert with_advantages(by_turn, lambda groups: [[None, None]])[0].rollouts[0].token_advantages is None


def test_each_token_of_a_row_has_the_advantage_of_its_turn() -> None:
    first, second = a_rollout([1.0, 0.0], [2, 3]), a_rollout([0.0, 0.0], [1, 2])
    one, other = rows_of(group_of(first, second), scale="none")
    assert one.token_advantages is not None
    assert one.token_advantages.tolist() == [0.75, 0.75, -0.25, -0.25, -0.25]
    assert one.advantage == pytest.approx(0.15)
    assert (other.advantage, other.token_advantages) == (-0.25, None)  # all its tokens have the same


def test_the_segments_of_a_rollout_share_its_tokens() -> None:
    whole = a_rollout([1.0, 0.0, 0.0], [2, 1, 3])
    tokens = whole.segments[0].tokens

    def part(start: int, end: int) -> Segment:
        return Segment(
            prompt_ids=(1,), tokens=Tokens(*(each[start:end] for each in tokens.arrays().values()))
        )

    parted = evolve(whole, segments=(part(0, 7), part(7, 12)))
    one, two, _ = rows_of(group_of(parted, a_rollout([0.0], [1])), scale="none")
    assert one.token_advantages is not None
    assert one.token_advantages.tolist() == [0.75, 0.75, -0.25]
    assert (two.advantage, two.token_advantages) == (-0.25, None)


def test_a_rollout_without_turns_in_its_record_counts_as_one_turn() -> None:
    its = a_group([1.0, 0.0])
    assert [row.advantage for row in rows_of(its, scale="none")] == [0.5, -0.5]
    assert all(row.token_advantages is None for row in rows_of(its))


def test_a_rollout_without_a_reward_is_masked() -> None:
    unscored = evolve(a_rollout([0.0], [2]), reward=None)
    assert methods.turns([group_of(unscored, a_rollout([1.0], [1]))])[0][0] is None
    assert methods.gigpo([group_of(unscored, a_rollout([1.0], [1]))])[0][0] is None


@pytest.mark.parametrize("bad", [[1.0, 2.0], [[1.0] * 5], [math.nan] * 5, ["a"] * 5])
def test_advantages_of_the_wrong_shape_name_the_rollout(bad: Any) -> None:
    its = group_of(a_rollout([1.0, 0.0], [2, 3]))
    with pytest.raises(PluginError, match=r"mine, prompt .* rollout 0: the advantages (have|are)"):
        with_advantages([its], Named(lambda groups: [[bad]]))


class Named:
    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, groups: Any) -> Any:
        return self.function(groups)

    def __str__(self) -> str:
        return "mine"


def test_the_trainer_sees_the_advantage_of_each_token() -> None:
    rows = rows_of(group_of(a_rollout([1.0, 0.0], [2, 3]), a_rollout([0.0, 0.0], [1, 2])), scale="none")
    micro = collate(rows, torch.device("cpu"), torch.float64)
    expected = [0.75, 0.75, -0.25, -0.25, -0.25, -0.25, -0.25, -0.25]
    assert micro.advantages.tolist() == pytest.approx(expected)


def test_rows_that_differ_in_a_tokens_advantage_are_not_equal() -> None:
    (one, _) = rows_of(group_of(a_rollout([1.0, 0.0], [2, 3]), a_rollout([0.0, 0.0], [1, 2])))
    assert one.token_advantages is not None
    assert one == evolve(one, token_advantages=one.token_advantages.copy())
    assert one != evolve(one, token_advantages=np.zeros(5, np.float32))
    assert one != evolve(one, token_advantages=None)


@pytest.mark.parametrize("function", [methods.turns, methods.gigpo])
def test_functions_by_turn_keep_the_contract(function: Any) -> None:
    check_advantage(function)


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"dynamic_sampling": {"enabled": True}}, r"dynamic_sampling\.enabled = true"),
        ({"filters": {"equal_rewards": {}}}, r"\[filters\.equal_rewards\]"),
    ],
)
@pytest.mark.parametrize("name", ["turns", "gigpo"])
def test_groups_with_equal_rewards_are_not_filtered_where_their_turns_teach(
    name: str, table: dict[str, Any], key: str
) -> None:
    config, host = configure(
        [{"tasks": {"a": {"env": "math:sort"}}, "advantage": {"name": name}, **table}], {}
    )
    with pytest.raises(grpo.ConfigError, match=f"{key} filters groups whose .* advantage.name = '{name}'"):
        make(config, host)
