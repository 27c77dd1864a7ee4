"""The metrics of a run: their names, what they mean, and that each has one definition."""

from __future__ import annotations

import json
import math
import re
from typing import get_args

import attrs
import numpy as np
import pytest
from test_docs import ROOT
from test_trainer import batch, model, not_finite_backward, ragged, setup  # noqa: F401 - model is a fixture
from tracked_run import METRICS_JSONL, a_run

from grpo_core.config import LossConfig, ScoreConfig
from grpo_core.contracts.events import Span
from grpo_core.contracts.records import Canary, EndReason, Group, Prompt, Rollout, RunInfo, Segment, Weights
from grpo_core.contracts.tokens import Tokens
from grpo_core.engines.wrapped import metrics_of
from grpo_core.loop.agreement import Agreement
from grpo_core.loop.canary import Canaries
from grpo_core.loop.dynamic import DynamicSampling
from grpo_core.loop.hints import Hints
from grpo_core.loop.metrics import (
    AT_TIMES,
    TIMES,
    feedback_values,
    headline,
    names_of_tasks,
    task_metrics,
    times,
    truncated,
    validation_metrics,
)
from grpo_core.loop.timeline import Timeline, recorded_by
from grpo_core.processes.child import memory
from grpo_core.training.trainer import TorchTrainer
from grpo_core.validation.strategies import Greedy
from grpo_plugin_algorithms.paired import Paired
from grpo_plugin_algorithms.shaping import Shaping, ShapingConfig
from grpo_plugin_algorithms.strategies import Majority, PassAtK
from grpo_plugin_report.cost import CostTracker


def rollout(reward=1.0, *, versions=(0,), sampled=None, reason="stop", **metrics):
    n = len(versions)
    return Rollout(
        segments=[
            Segment(prompt_ids=(1,), tokens=Tokens((2,) * n, sampled or (True,) * n, (0.0,) * n, versions))
        ],
        reward=reward,
        finish_reason=reason,
        metrics=metrics,
    )


def group(*rollouts, task="sort"):
    prompt = Prompt(messages="x", id="p", environment=task)
    return Group(prompt=prompt, rollouts=rollouts, generation_version=0, target_version=1)


def of_lengths(*lengths):
    return group(*(rollout(float(n), versions=(0,) * n) for n in lengths))


def test_lengths_are_summarized_by_the_shortest_the_median_and_the_longest():
    found = task_metrics([of_lengths(*range(1, 21))], step=0)
    told = [found[f"completion_tokens_{part}/sort"] for part in ("min", "p50", "p95", "max")]
    assert told == [1, 10, 19, 20]
    assert found["reward_std/sort"] == pytest.approx(np.std(range(1, 21)))
    assert task_metrics([of_lengths(7)], step=0)["completion_tokens_p95/sort"] == 7


def test_the_shares_of_each_staleness_sum_to_1():
    found = task_metrics([group(rollout(versions=(3, 3, 4)), rollout(versions=(5,)))], step=5)
    assert {name: value for name, value in found.items() if name.startswith("staleness_share")} == {
        "staleness_share_0": 0.25,
        "staleness_share_1": 0.25,
        "staleness_share_2": 0.5,
    }


def test_answers_of_tools_that_report_an_error_are_counted():
    said = [{"role": "tool", "content": text} for text in ("42", "error: there is no tool 'x'", "error: no")]
    messages = ({"role": "user", "content": "error: me"}, *said)
    found = task_metrics([group(attrs.evolve(rollout(), tool_calls=3, messages=messages), rollout())], step=0)
    assert (found["tool_calls/sort"], found["tool_failures/sort"]) == (1.5, 1.0)


def test_the_latency_of_an_environment_is_that_of_its_calls():
    spans = [
        Span(lane="environment sort", what="evaluate", begin=0.0, end=3.0, busy=3.0, calls=4, seconds=8.0),
        Span(lane="environment sort", what="open", begin=0.0, end=1.0, busy=1.0, calls=4, seconds=4.0),
        Span(lane="loop", what="wait for the checkpoint", begin=0.0, end=1.0, busy=1.0),
        Span(lane="loop", what="cut of the checkpoint", begin=1.0, end=3.0, busy=2.0),
    ]
    assert times(spans) == {
        "environment_seconds/sort": 3.0,
        "environment_latency/sort": 2.0,
        "time/checkpoint": 3.0,
    }


def test_successes_that_were_cut_off_do_not_count_as_finished():
    ended, cut = (attrs.evolve(rollout(reason=reason), success=True) for reason in ("stop", "length"))
    found = task_metrics([group(ended, cut, attrs.evolve(cut, success=False))], step=0)
    assert found["accuracy/sort"] == pytest.approx(2 / 3)
    assert found["accuracy_finished/sort"] == pytest.approx(1 / 3)


# ---------------------------------------------------------------------------------- names

PAGE = dict(re.findall(r"^\| `(.+?)` \|(.*)", (ROOT / "docs" / "metrics.md").read_text(), re.MULTILINE))
"""Sentences of the page, by metric; a part of a name in capitals stands for any text."""
WILDCARD = re.compile("TASK|PART|NAME|KIND|[KN]$")


def documented(name):
    """Return the entry of the page that stands for a metric, or None if no entry does."""
    # entries with fewer wildcards come first: they name a metric more exactly
    entries = sorted(PAGE, key=lambda entry: len(WILDCARD.findall(entry)))
    return next((entry for entry in entries if pattern(entry).fullmatch(name)), None)


def pattern(entry):
    """Return the pattern of an entry; only the name of a task may contain a slash."""
    texts, holes = WILDCARD.split(entry), WILDCARD.findall(entry)
    parts = [".+" if hole == "TASK" else r"\d+" if hole in "KN" else "[^/]+" for hole in holes]
    return re.compile("".join(re.escape(t) + p for t, p in zip(texts, [*parts, ""], strict=True)))


def names_of_a_run(strategy, path, **changes):
    """Names in metrics.jsonl of a run of the real pipeline, validation strategy and trackers."""
    with recorded_by(Timeline()):
        run = a_run(path, strategy, **changes)
    rows = map(json.loads, (run.path / METRICS_JSONL).read_text().splitlines())
    return {name for row in rows for name in row} - {"step", "time"}


def names_of_a_canary():
    known = Canary(prompt_ids=(1,), token_ids=(1,), logprobs=(-1.0,))
    canaries = Canaries([known.prompt_ids])
    weights = Weights(version=0, location="", nbytes=0, tensors=(), canary=(known,))
    canaries.verified(weights, Agreement(answers=((1, -1.0),)))
    return set(canaries.metrics())


def names_of_a_price(path):
    found = {}
    CostTracker(
        RunInfo(name="run", directory=path, config={}, set_metrics=found.update), per_million_tokens=1.0
    )
    return set(found)


class Measured:
    """Has the metrics of a pool of engines, and of vLLM."""

    def metrics(self):
        names = ("tokens_per_second/engine_0", "cache_use", "preemptions", "cached_prompt_tokens")
        return dict.fromkeys(names, 0.0)


def none_for_the_first(groups):
    return [[None, *([1.0] * (len(group.rollouts) - 1))] for group in groups]


@pytest.fixture(scope="module")
def written(model, tmp_path_factory):  # noqa: F811
    """Names of all metrics that the pipeline, the trainer and the validation strategies write."""
    path = tmp_path_factory.mktemp("runs")
    none_short = DynamicSampling(
        max_extra_groups=10_000, filters={"short": lambda group: None if group.slot else "?"}
    )
    found = names_of_a_run(
        Greedy(), path / "greedy", dynamic=none_short, shaping=Shaping(ShapingConfig(token_price=0.1))
    )
    found |= names_of_a_run(Greedy(), path / "masked", advantages=none_for_the_first)
    found |= names_of_a_run(PassAtK(k=[1, 2], n=2), path / "pass_at_k")
    found |= names_of_a_run(Majority(n=3), path / "majority")
    found |= names_of_a_run(Paired(margin=2.0), path / "paired")
    found |= set(task_metrics([group(rollout(), rollout(None, reason="length"))], step=0))
    found |= set(task_metrics([group(attrs.evolve(rollout(), tool_calls=1))], step=1))
    cut_success = attrs.evolve(rollout(reason="length"), success=True)
    found |= set(validation_metrics({"sort": Greedy()._summary("sort", [cut_success])}))
    found |= set(  # of these, some take no virtual time
        times(Span(lane=lane, what=what, begin=0.0, end=1.0, busy=1.0) for lane, what in TIMES)
    )
    found |= {*memory(), *metrics_of({"engine": Measured()})}
    found |= set(Hints(choose=lambda its: [], who="").read())
    found |= names_of_a_canary() | names_of_a_price(path)
    trainer = TorchTrainer(attrs.evolve(setup(model, loss={"kl": {"coefficient": 0.01}}), max_non_finite=0.5))
    rows = ragged()
    rows[0] = attrs.evolve(rows[0], advantage=math.nan)
    found |= set(trainer.step(batch(rows)).metrics)
    not_finite_backward(trainer, {1})
    found |= set(trainer.step(batch(ragged(), 1)).metrics)
    for loss in (
        LossConfig(max_sequence_error=1.01),
        LossConfig(options={"mask": {"off_policy_limit": 1.0}}),
        LossConfig(name="distillation"),
        LossConfig(name="self_distillation"),
        LossConfig(name="vespo"),
        LossConfig(options={"entropy": {"target": 1.0}}),
    ):
        given = attrs.evolve(setup(model), loss=loss, scores={"teacher": ScoreConfig(weights=model)})
        found |= set(TorchTrainer(given).step(batch(ragged())).metrics)
    return found


@pytest.mark.long
def test_every_metric_that_a_run_writes_is_documented(written):
    assert {name for name in written if documented(name) is None} == set()


@pytest.mark.long
def test_every_documented_metric_is_written_by_a_run(written):
    on_a_gpu = {"memory_gpu/NAME"}
    assert set(PAGE) - {documented(name) for name in written} == on_a_gpu


@pytest.mark.long
def test_a_name_has_one_slash_at_most_and_two_behind_validation(written):
    for name in written:
        assert name.count("/") <= (2 if name.startswith("validation/") else 1), name


def test_goals_may_name_metrics_that_are_absent_at_times():
    measured = ("time/", "validation/")  # others of these groups are always there
    absent = {name for name, meaning in PAGE.items() if "absent if" in meaning}
    assert {name for name in absent if not name.startswith((*measured, *AT_TIMES))} == set()
    assert {"reward", "groups", "completion_tokens_p95", "accuracy"} <= names_of_tasks()


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("reward/sort", "reward/TASK"),
        ("reward/a/b", "reward/TASK"),
        ("feedback_exact/sort", "feedback_PART/TASK"),
        ("validation/a/b/accuracy", "validation/TASK/accuracy"),
        ("validation/sort/pass@8_low", "validation/TASK/NAME_low"),
        ("validation/sort/pass@8", "validation/TASK/pass@K"),
        ("validation/sort/something", None),
        ("rewards/sort", None),
        ("loss", "loss"),
    ],
)
def test_a_metric_is_found_by_its_name(name, entry):
    assert documented(name) == entry


# ---------------------------------------------------------------------------------- definitions


@pytest.mark.parametrize("reason", get_args(EndReason))
def test_truncated_means_a_token_limit_in_training_and_in_validation(reason):
    one = rollout(reason=reason)
    cut_off = reason in ("length", "tokens")
    assert one.truncated == cut_off
    assert task_metrics([group(one)], step=0)["truncated/sort"] == float(cut_off)
    assert truncated([one, rollout()]) == cut_off / 2
    assert Greedy()._summary("sort", [one])["truncated"] == float(cut_off)


def test_rewards_that_differ_by_rounding_are_equal_in_metrics_as_in_advantages():
    noise = group(rollout(0.1 + 0.2), rollout(0.3))
    different = group(rollout(0.3), rollout(0.4))
    assert task_metrics([noise, different], step=0)["frac_reward_zero_std/sort"] == 0.5


def test_staleness_counts_sampled_tokens_only():
    mixed = rollout(versions=(3, -1, 5), sampled=(True, False, True))
    metrics = task_metrics([group(mixed)], step=5)
    assert (metrics["staleness/sort"], metrics["staleness_max"], metrics["staleness_mean"]) == (1.0, 2.0, 1.0)
    assert metrics["completion_tokens/sort"] == 2
    silent = task_metrics([group(rollout(versions=()))], step=5)
    assert (silent["staleness/sort"], silent["staleness_max"]) == (0.0, 0.0)


def test_what_an_environment_reports_becomes_a_metric_without_a_slash():
    assert feedback_values([rollout(exact=1.0), rollout(exact=0.0, **{"format/tags": 0.5})]) == {
        "feedback_exact": [1.0, 0.0],
        "feedback_format%2Ftags": [0.5],
    }


def test_accuracy_is_the_share_of_successes_and_is_not_claimed_without_a_threshold():
    won, lost = attrs.evolve(rollout(3.4), success=True), attrs.evolve(rollout(0.9), success=False)
    assert task_metrics([group(won, lost, lost, lost)], step=0)["accuracy/sort"] == 0.25
    metrics = task_metrics([group(rollout(3.4), rollout(0.9))], step=0)
    assert "accuracy/sort" not in metrics
    assert metrics["reward/sort"] == 2.15


def test_accuracy_stands_for_a_validation_or_else_its_first_metric():
    assert headline(["pass@4", "accuracy"]) == "accuracy"
    assert headline(["pass@4", "reward"]) == "pass@4"
    assert headline([]) is None
    assert headline(["pass@4_low", "pass@4_high", "accuracy_low", "accuracy_high"]) == "accuracy"
    assert headline(["feedback_form", "completion_tokens", "truncated", "errors", "unscored"]) is None
