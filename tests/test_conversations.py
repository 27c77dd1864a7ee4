"""A rollout is all of its turns: rewards are added, metrics are combined by their rule, and nothing is lost.

The oracle of the properties is numpy, on a table with one column for each turn and NaN where a turn gives no
value.
"""

from __future__ import annotations

import asyncio
import math
import textwrap

import forks
import numpy as np
import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from test_turns import played

import grpo_core as grpo
from grpo_core import advantages
from grpo_core.api.reward import added, environment_of
from grpo_core.config import EnvironmentConfig
from grpo_core.environments.pool import EVERY, EnvironmentPool
from grpo_core.kit import Judgement
from grpo_core.testing import FakeEngine, FakeEnvironment, HostedEnvironment
from grpo_plugin_algorithms.shaping import ShapingConfig
from grpo_plugin_devkit.objectives import a_group

NAN = math.nan
RULES = {"mean": np.nanmean, "sum": np.nansum, "max": np.nanmax, "last": lambda row: row[~np.isnan(row)][-1]}


def conversation(turns, combine=None):
    """Play a rollout whose turns have this feedback."""

    def feedback(episode):
        last = episode.turn == len(turns) - 1
        return evolve(turns[episode.turn], done=last, messages=() if last else "go on")

    (rollout,) = played(FakeEnvironment(feedback, max_turns=len(turns), combine=combine), FakeEngine())
    return rollout


# Rewards, metric "m" (NaN: the turn gives none), rule, the reward and the metric of the rollout
CONVERSATIONS = {
    "one turn": ([1.0], [0.5], None, 1.0, 0.5),
    "the mean is the default": ([0.0, 1.0], [1.0, 0.0], None, 1.0, 0.5),
    "three of six replies are wrong": ([0.0] * 6, [1.0, 0.0] * 3, "mean", 0.0, 0.5),
    "a turn without a value does not count": ([0.0, 0.0, 1.0], [NAN, 1.0, 0.0], "mean", 1.0, 0.5),
    "the last turn gives none": ([1.0, 1.0], [3.0, NAN], "mean", 2.0, 3.0),
    "a sum": ([1.0, 2.0], [1.0, 2.0], "sum", 3.0, 3.0),
    "a sum with a gap": ([1.0, 2.0, 0.0], [1.0, NAN, 2.0], "sum", 3.0, 3.0),
    "ten tenths are one": ([0.1] * 10, [0.1] * 10, "sum", 1.0, 1.0),
    "a sum that cancels": ([1e16, 1.0, -1e16], [1e16, 1.0, -1e16], "sum", 1.0, 1.0),
    "the last": ([0.0, 0.0, 1.0], [3.0, 2.0, 1.0], "last", 1.0, 1.0),
    "the last that a turn gives": ([0.0, 0.0, 1.0], [3.0, 2.0, NAN], "last", 1.0, 2.0),
    "the largest": ([0.0, 0.0, 1.0], [3.0, 5.0, 1.0], "max", 1.0, 5.0),
    "the largest of negative ones": ([0.0, 0.0], [-3.0, -5.0], "max", 0.0, -3.0),
    "nobody gives it": ([1.0, 1.0], [NAN, NAN], "sum", 2.0, None),
}


@pytest.mark.parametrize("label", CONVERSATIONS)
def test_a_rollout_is_what_its_turns_are_together(label):
    rewards, values, rule, reward, metric = CONVERSATIONS[label]
    turns = [
        grpo.Feedback(reward=given, metrics={} if math.isnan(value) else {"m": value})
        for given, value in zip(rewards, values, strict=True)
    ]
    rollout = conversation(turns, {"m": rule} if rule else None)
    assert (rollout.reward, rollout.metrics.get("m")) == (reward, metric)
    assert rollout.turn_rewards == tuple(rewards)


numbers = st.floats(-1e6, 1e6)
tables = st.integers(1, 6).flatmap(
    lambda turns: st.dictionaries(
        st.sampled_from("abcd"), st.lists(st.none() | numbers, min_size=turns, max_size=turns), min_size=1
    )
)


@given(table=tables, rules=st.dictionaries(st.sampled_from("abcd"), st.sampled_from(sorted(RULES))))
def test_metrics_of_any_turns_are_combined_as_numpy_combines_them(table, rules):
    turns = len(next(iter(table.values())))
    rollout = conversation(
        [
            grpo.Feedback(
                reward=1.0, metrics={name: row[i] for name, row in table.items() if row[i] is not None}
            )
            for i in range(turns)
        ],
        rules,
    )
    assert rollout.reward == turns
    known = {name: row for name, row in table.items() if any(value is not None for value in row)}
    assert rollout.metrics.keys() == known.keys()
    for name, row in known.items():
        expected = RULES[rules.get(name, "mean")](np.array(row, dtype=float))
        assert rollout.metrics[name] == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_answer_train_and_states_are_of_all_turns():
    turns = [
        grpo.Feedback(reward=0.0, answer="first", train=False, state="a"),
        grpo.Feedback(reward=0.0, answer="second"),
        grpo.Feedback(reward=1.0, state="c"),
    ]
    rollout = conversation(turns)
    assert (rollout.answer, rollout.train, rollout.turn_states) == ("second", False, ("a", "", "c"))


@pytest.mark.parametrize("odd", [0, 1, 2])
@pytest.mark.parametrize("rule", ["mean", "sum", "max"])
def test_a_metric_that_one_turn_cannot_give_has_no_value(odd, rule):
    """A part that is left would pass for the whole."""
    turns = [
        Judgement(reward=0.0, **({"left_out": {"m": "nan"}} if i == odd else {"metrics": {"m": 1.0}}))
        for i in range(3)
    ]
    rollout = conversation(turns, {"m": rule})
    assert ("m" in rollout.metrics, rollout.left_out) == (False, {"m": "nan"})


# ---------------------------------------------------------------------------------- declarations


class Game(grpo.Environment):
    max_turns = 2

    def prompts(self, split):
        return [grpo.Prompt(messages="a", id=str(number)) for number in range(4)]

    def evaluate(self, episodes):
        return [
            grpo.Feedback(
                reward=1.0, done=each.turn == 1, messages="go" if not each.turn else (), metrics={"points": 1}
            )
            for each in episodes
        ]


def pool_of(combine, parts=None):
    game = Game()
    game.combine = combine
    return EnvironmentPool([HostedEnvironment(game)], EnvironmentConfig(), name="game", parts=parts or {})


@pytest.mark.parametrize(
    "combine",
    [{"points": "median"}, {"points": None}, {"points": ["sum"]}, {1: "sum"}, ["sum"], {"*": "sum"}],
)
def test_an_unknown_rule_is_refused(combine):
    with pytest.raises(grpo.PluginError, match="combine"):
        pool_of(combine)


@pytest.mark.parametrize("rule", ["mean", "last", "max"])
@pytest.mark.parametrize("part", ["points", EVERY])
def test_a_part_of_the_reward_that_is_not_added_is_refused(rule, part):
    with pytest.raises(grpo.ConfigError, match=r"shaping\.weights .*'points'"):
        pool_of({"points": rule}, {part: "shaping.weights"})


@pytest.mark.parametrize("part", ["points", EVERY])
def test_a_part_of_the_reward_is_added_whatever_is_declared(part):
    for combine in ({}, {"points": "sum"}):
        pool = pool_of(combine, {part: "shaping.weights"})
        (rollout,) = played(pool, FakeEngine())
        assert (rollout.reward, rollout.metrics) == (2.0, {"points": 2.0})
    (rollout,) = played(pool_of({}), FakeEngine())
    assert rollout.metrics == {"points": 1.0}


def test_a_name_that_no_episode_has_is_refused():
    pool = pool_of({"points": "sum", "pionts": "sum"})
    played(pool, FakeEngine())
    with pytest.raises(grpo.PluginError, match="'pionts', which none of 1 finished"):
        pool.check_combine()
    with pytest.raises(grpo.PluginError, match="'pionts'"):
        played(pool, FakeEngine(), n=64)
    known = pool_of({"points": "sum"})
    played(known, FakeEngine(), n=80)
    known.check_combine()


FILE = """
    import grpo_core as grpo


    class Game(grpo.Environment):
        max_turns = 2
        combine = {COMBINE}

        def prompts(self, split):
            return [grpo.Prompt(messages=f"{{n}}:", id=str(n)) for n in range(20)]

        def solve(self, prompt):
            return "ok"

        def evaluate(self, episodes):
            return [
                grpo.Feedback(
                    reward=points, metrics={{"points": points}}, done=each.turn == 1,
                    messages="go:" if each.turn == 0 else (),
                )
                for each in episodes
                for points in [each.turn + 1.0]
            ]


    class Said(grpo.TextEngine):
        def __init__(self, setup):
            pass

        async def chat(self, messages, tools, request):
            return grpo.Reply(message={{"role": "assistant", "content": "go"}}, completion_tokens=3)


    @grpo.hookimpl
    def grpo_engines():
        return {{"said": grpo.EngineOffer(Said, output="text")}}
"""


def grpo_core(folder, *arguments, combine="{}"):
    (folder / "game.py").write_text(textwrap.dedent(FILE).format(COMBINE=combine))
    return forks.grpo(folder, *arguments, "--set", "tasks.game.env=./game.py:Game", "--output", "run")


TRAIN = [
    *("train", "--quiet", "--set", "model.options.warm_start_steps=80", "--set", "trainer.steps=1"),
    *("--set", "trainer.prompts_per_step=2", "--set", "rollout.group_size=2", "--set", "validation.every=0"),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    "reads",
    [
        ["shaping.weights.points=1.0"],
        pytest.param(["advantage.name=gdpo"], marks=pytest.mark.nightly),
        pytest.param(
            ["advantage.name=gdpo", "advantage.options.weights.points=1.0"], marks=pytest.mark.nightly
        ),
    ],
)
def test_what_pays_is_what_the_turns_pay_together(tmp_path, reads):
    keys = [part for key in reads for part in ("--set", key)]
    ended = grpo_core(tmp_path, *TRAIN, *keys)
    assert ended.returncode == 0, ended.stderr
    values = grpo.Run(tmp_path / "run").metrics()[0]
    assert values["feedback_points/game"] == values["reward/game"] == 3.0
    assert values.get("shaped_reward/game", 3.0) == 3.0
    other = tmp_path / "other"
    other.mkdir()
    refused = grpo_core(other, *TRAIN, *keys, combine='{"points": "last"}')
    assert refused.returncode != 0
    assert "points" in refused.stderr
    assert "Traceback" not in refused.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("combine", "named"), [('{"points": "median"}', "median"), ('{"point": "sum"}', "'point'")]
)
def test_an_unknown_rule_or_name_ends_a_validation_with_one_line(tmp_path, combine, named):
    ended = grpo_core(tmp_path, "validate", "--engine", "./game.py:said", combine=combine)
    assert ended.returncode != 0
    assert named in ended.stderr
    assert "Traceback" not in ended.stderr


# ---------------------------------------------------------------------------------- lists of rewards


def of_list(*functions):
    said = ({"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"})
    episode = grpo.Episode(prompt=grpo.Prompt(messages="a"), messages=said)
    return asyncio.run(added(functions)(episode))


def test_a_list_of_rewards_keeps_what_each_feedback_has():
    def judged(reply):
        return grpo.Feedback(reward=0.5, metrics={"length": 3.0}, answer=reply[:1], train=False, state="s")

    def short(reply):
        return 1.0

    found = of_list(judged, (short, 0.1))
    assert found == grpo.Feedback(
        reward=0.6, metrics={"judged": 0.5, "length": 3.0, "short": 1.0}, answer="b", train=False, state="s"
    )
    environment = environment_of(added([judged, short]), "both")
    assert environment.combine == {"judged": "sum", "short": "sum"}


@pytest.mark.parametrize("error", [{"error": "no verdict"}, {"error": "no verdict", "reward": 1.0}])
def test_a_list_of_rewards_is_unscored_if_one_failed(error):
    found = of_list(lambda reply: 1.0, lambda reply: grpo.Feedback(**error))
    assert found.error == "no verdict"


def test_two_functions_with_a_metric_of_one_name_are_refused():
    def first(reply):
        return grpo.Feedback(reward=1.0, metrics={"length": 1.0})

    def second(reply):
        return grpo.Feedback(reward=1.0, metrics={"length": 2.0})

    with pytest.raises(grpo.PluginError, match="second gives the metric 'length'"):
        of_list(first, second)


# ---------------------------------------------------------------------------------- thresholds


@given(parts=st.lists(st.integers(1, 9), min_size=1, max_size=12), data=st.data())
def test_a_sum_of_shares_reaches_its_threshold_in_any_order(parts, data):
    """The oracle are whole numbers."""
    whole = sum(parts)
    shares = [part / whole for part in data.draw(st.permutations(parts))]
    total = sum(shares)
    assert advantages.reaches(total, 1.0, shares)
    assert advantages.reaches(total, 1.0)
    lacking = total - min(parts) / whole
    assert not advantages.reaches(lacking, 1.0, shares)


def test_a_sum_that_cancels_reaches_zero():
    terms = [0.1, 0.2, -0.3]
    assert sum(terms) != 0.0
    assert advantages.reaches(-sum(terms), 0.0, terms)
    assert not advantages.reaches(-0.1, 0.0, terms)
    assert not evolve(
        a_group([0.0]).rollouts[0], success=None, reward=5.6e-17, turn_rewards=(0.3, -0.3)
    ).right


def test_success_filters_goals_and_curricula_have_the_tolerance_of_advantages():
    from grpo_core.loop.endings import Goal
    from grpo_plugin_algorithms.filters import pass_rate

    almost = sum([0.1] * 10)
    assert almost < 1.0
    group = a_group([almost] * 2)
    group = evolve(group, rollouts=tuple(evolve(each, success=None) for each in group.rollouts))
    assert group.successes() == group.successes(1.0) == [True, True]
    assert pass_rate(group, low=1.0) is None
    assert pass_rate(group, low=0.0, high=0.5) is not None
    assert Goal.parse("reward/game >= 1.0").reached({"reward/game": almost})
    assert Goal.parse("kl <= 0.1").reached({"kl": 0.1 + 1e-17})
    assert not Goal.parse("reward/game >= 1.0").reached({"reward/game": 0.999})


def test_the_parts_of_shaping_are_its_weights():
    shaping = ShapingConfig(weights={"right": 1.0, "short": 0.5}).reward_shaping(16)
    assert sorted(shaping.parts) == ["right", "short"]


def test_two_filters_that_would_share_a_metric_are_refused(tmp_path):
    from grpo_core.app import making
    from grpo_core.plugins.configured import configured

    for name in ("a", "b"):
        (tmp_path / f"{name}.py").write_text("def odd(group):\n    return None\n")
    filters = {f"{tmp_path}/{name}.py:odd": {} for name in ("a", "b")}
    config, host = configured([{"tasks": {"t": {"env": "math:sort"}}, "filters": filters}])
    with pytest.raises(grpo.ConfigError, match="have the same name in metrics"):
        making.dynamic_sampling(config, host)
