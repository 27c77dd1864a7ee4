"""Filters reject finished groups, each with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_core.app import making
from grpo_core.app.make import make
from grpo_core.config import build
from grpo_core.contracts.errors import PluginError, SamplingError
from grpo_core.loop import dynamic
from grpo_core.loop.dynamic import DynamicSampling, Rejection, short_name
from grpo_core.loop.laws import Laws
from grpo_core.plugins.host import PluginHost
from grpo_plugin_algorithms import filters as further
from grpo_plugin_devkit.objectives import a_group

FILE = """
import grpo_core as grpo

def odd(group, *, limit: float = 1.0):
    return "it is odd" if sum(group.rewards) % 2 == limit else None

def wrong(group):
    return True

@grpo.hookimpl
def grpo_filters():
    return {"odd": odd}
"""


def test_a_filter_says_why() -> None:
    assert dynamic.equal_rewards(a_group([1.0, 1.0])) == "its rewards are equal"
    assert dynamic.equal_rewards(a_group([1.0, 0.9]), tolerance=0.2) == "its rewards are equal"
    assert dynamic.equal_rewards(a_group([1.0, 0.0])) is None
    mostly = a_group([1.0, 1.0, 1.0, 0.0])
    assert further.pass_rate(mostly, low=0.1, high=0.7) == "its pass rate 0.75 is above 0.7"
    assert further.pass_rate(mostly, low=0.8) == "its pass rate 0.75 is below 0.8"
    assert further.pass_rate(mostly, low=0.75, high=0.75) is None
    assert further.mean_length(mostly, longest=4) == (
        "its rollouts have 5.0 sampled tokens on average, more than 4"
    )
    assert further.mean_length(mostly, shortest=6) == (
        "its rollouts have 5.0 sampled tokens on average, fewer than 6"
    )
    assert further.mean_length(mostly, shortest=5, longest=5) is None


A_TASK = {"tasks": {"any": {"env": "agent:true"}}}


def made(tables: dict[str, Any], **host: Any) -> DynamicSampling | None:
    config = build([{"trainer": {"prompts_per_step": 2}}, tables])
    return making.dynamic_sampling(config, PluginHost.discover(allow=["agents", "algorithms"]))


def test_the_first_filter_that_rejects_counts() -> None:
    dynamic = made(
        {
            "dynamic_sampling": {"enabled": True},
            "filters": {"pass_rate": {"high": 0.7}, "mean_length": {"longest": 4}},
        }
    )
    assert dynamic is not None
    groups = [a_group(r) for r in ([1.0, 1.0], [1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [1.0, 0.0])]
    found = [dynamic.rejects(group) for group in groups]
    assert [each.filter if each else None for each in found] == [
        "equal_rewards",
        "pass_rate",
        "mean_length",
        "mean_length",
    ]
    assert dynamic.read() == {
        "filtered/task": 4.0,
        "filtered_fraction/task": 1.0,
        "filtered_reward/task": pytest.approx((1.0 + 0.75 + 0.25 + 0.5) / 4),
        "filtered_by_equal_rewards/task": 1.0,
        "filtered_by_mean_length/task": 2.0,
        "filtered_by_pass_rate/task": 1.0,
    }


def test_filters_alone_do_not_look_at_equal_rewards() -> None:
    dynamic = made({"filters": {"mean_length": {"longest": 100}}})
    assert dynamic is not None
    assert dynamic.rejects(a_group([1.0, 1.0])) is None
    assert made({}) is None


def test_too_many_rejections_name_the_filters() -> None:
    dynamic = made({"filters": {"pass_rate": {"high": 0.5}}, "dynamic_sampling": {"max_extra_groups": 1}})
    assert dynamic is not None
    dynamic.rejects(a_group([1.0, 1.0]))
    with pytest.raises(SamplingError, match=r"the other 2 were filtered \(2 by pass_rate\)"):
        dynamic.rejects(a_group([1.0, 1.0]))


def test_a_file_offers_a_filter_with_options(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    name = f"{tmp_path}/mine.py:odd"
    dynamic = made({"filters": {name: {"limit": 0.0}}})
    assert dynamic is not None
    assert dynamic.rejects(a_group([1.0, 1.0])) == Rejection("odd", "it is odd")
    assert short_name(name) == "odd"


def test_a_filter_that_returns_no_text_is_named(tmp_path: Any) -> None:
    (tmp_path / "mine.py").write_text(FILE)
    dynamic = made({"filters": {f"{tmp_path}/mine.py:wrong": {}}})
    assert dynamic is not None
    with pytest.raises(
        PluginError, match=r"mine.py:wrong.* returned bool True for prompt .* expected a text"
    ):
        dynamic.rejects(a_group([1.0, 0.0]))


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({"pass_rate": {"low": 0.9, "high": 0.1}}, "low is 0.9 and high is 0.1; expected 0 <= low <= high"),
        ({"pass_rate": {"lo": 0.1}}, "has no option 'lo'"),
        ({"mean_lenght": {}}, "there is no filter 'mean_lenght'. Did you mean .*mean_length"),
        ({"mean_length": {"shortest": 5, "longest": 4}}, "shortest is 5 and longest is 4"),
    ],
)
def test_filters_are_checked_before_a_run(tables: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        make(build([{**A_TASK, "filters": tables}]), PluginHost.discover(allow=["agents", "algorithms"]))


@pytest.mark.parametrize(
    ("name", "reason", "holds"),
    [("pass_rate", "it is above", True), ("mean_length", "too long", False), ("pass_rate", "", False)],
)
def test_verify_knows_the_filters_of_the_configuration(name: str, reason: str, holds: bool) -> None:
    laws = Laws()
    config = {
        "trainer": {"prompts_per_step": 1, "steps": 1},
        "pipeline": {"max_staleness": 0, "policy": "deadline"},
        "rollout": {"max_retries": 0, "group_size": 2},
        "filters": {"pass_rate": {}},
    }
    laws.observe({"event": "RunStarted", "step": 0, "config": config, "resumed": False, "buffer": {}})
    slot = {"slot": 0, "task": "t", "prompt": "p", "generation_version": 0, "target_version": 0, "attempt": 0}
    laws.observe({"event": "Dispatched", "step": 0, "slots": [{**slot, "kept": 0}]})
    laws.observe({"event": "GroupFiltered", "step": 0, "slot": 0, "filter": name, "reason": reason})
    assert ("filter" not in {broken.law for broken in laws.violations}) is holds
    assert {broken.law for broken in laws.violations} <= {"filter"}
