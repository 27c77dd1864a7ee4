"""Validation sets: named held-out prompts with a separate environment, strategy and interval."""

from __future__ import annotations

import json
import re

import pytest
from forks import grpo
from hypothesis import given
from hypothesis import strategies as st

from grpo_core.app import making
from grpo_core.app.make import make
from grpo_core.app.making import RunSetup
from grpo_core.config import ValidationConfig, build
from grpo_core.config.run import RolloutConfig
from grpo_core.contracts.errors import ConfigError, GrpoError
from grpo_core.contracts.events import ValidationPlayed
from grpo_core.contracts.records import Prompt
from grpo_core.loop.laws import Laws, Terms
from grpo_core.loop.retention import Retention
from grpo_core.loop.versions import Interval
from grpo_core.plugins.host import PluginHost
from grpo_core.reporting.stored import stored_rollouts
from grpo_core.reporting.verification import verified
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer, run
from grpo_core.validation.runner import HeldOut

SORT = {"tasks": {"sort": {"env": "math:sort"}}}


def configured(**validation):
    return build([SORT, {"validation": validation}])


# ---------------------------------------------------------------------------------- configuration


def test_a_set_has_the_keys_of_validation_that_it_does_not_set_itself():
    config = configured(
        name="pass_at_k",
        options={"k": 4, "temperature": 0.6},
        every=5,
        top_p=0.9,
        sets={
            "same": {"task": "sort", "options": {"n": 8}},
            "other": {"env": "math:reverse", "name": "greedy", "every": 20, "prompts": 30, "at_start": False},
        },
    ).validation
    same, other = config.of_set("same"), config.of_set("other")
    assert (same.name, same.options, same.every) == ("pass_at_k", {"k": 4, "temperature": 0.6, "n": 8}, 5)
    assert (same.top_p, same.prompts, same.at_start) == (0.9, 200, True)
    assert (other.name, other.options, other.every) == ("greedy", {}, 20), "options of another strategy"
    assert (other.top_p, other.prompts, other.at_start) == (0.9, 30, False)
    assert list(config.environments(config.sets)) == ["other"]


@pytest.mark.parametrize(
    ("sets", "message"),
    [
        ({"a": {}}, "task = '' with env = '': set either the task or the environment"),
        ({"a": {"task": "sort", "env": "math:sort"}}, "task = 'sort' with env = 'math:sort'"),
        (
            {"a": {"task": "sort", "success": 1.0}},
            "env_options, success or data: these keys belong to `env`",
        ),
        ({"a/b": {"task": "sort"}}, "'validation.sets': the name 'a/b' of a set must be 1 to 64 letters"),
        (
            {"a": {"task": "sort", "n": 4}},
            "An option of a plugin is written 'validation.sets.a.options.n'.",
        ),
        (
            {"a": {"task": "sort", "strategy": "greedy"}},
            "Did you mean 'validation.name'?",
        ),
        ({"a": {"task": "sort", "every": -1}}, "'every' must be >= 0: -1"),
    ],
)
def test_mistakes_in_a_set_are_named(sets, message):
    with pytest.raises(ConfigError) as raised:
        configured(sets=sets)
    assert message in str(raised.value)


def test_an_option_of_a_strategy_is_found_where_options_are():
    with pytest.raises(
        ConfigError, match=r"'validation.until'. An option of a plugin is written 'validation.options.until'"
    ):
        configured(name="paired", until="decided")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"validation": {"sets": {"sort": {"env": "math:sort"}}}}, "'sort' is the name of a task"),
        (
            {"validation": {"sets": {"a": {"task": "srt"}}}},
            "a.task is 'srt'; the tasks are sort",
        ),
        ({"validation": {"sets": {"a": {"env": "math:srt"}}}}, "'math:srt'"),
        ({"validation": {"sets": {"a": {"task": "sort", "name": "pass_at"}}}}, "'pass_at'. Did you mean"),
        ({"validation": {"sets": {"a": {"task": "sort", "options": {"n": 4}}}}}, "'n'"),
        (
            {"validation": {"every": 0, "sets": {"a": {"task": "sort"}}}},
            "validation.sets.a is never measured, since validation.every is 0: set validation.sets.a.every",
        ),
        (
            {
                "checkpoint": {"best": "validation/b/accuracy"},
                "validation": {"sets": {"a": {"task": "sort"}}},
            },
            "checkpoint.best is 'validation/b/accuracy', which is not a metric of validation; expected "
            "validation/TASK/NAME with one of the tasks sort or of the sets a",
        ),
        (
            {
                "checkpoint": {"best": "validation/a/accuracy"},
                "validation": {"sets": {"a": {"task": "sort", "every": 0}}},
            },
            "checkpoint.every and validation.sets.a.every must not be 0",
        ),
        (
            {"trainer": {"stop_when": "validation/a/accuracy >= 1"}},
            "trainer.stop_when is 'validation/a/accuracy'",
        ),
        (
            {"trainer": {"stop_when": "validation/sort/accuracy >= 1"}, "validation": {"every": 0}},
            "which nothing measures: validation.every is 0",
        ),
        (
            {"trainer": {"stop_when": "reward/srot >= 0.9"}},
            "trainer.stop_when is 'reward/srot >= 0.9', and there is no task 'srot'. Did you mean 'sort'?",
        ),
        (
            {"checkpoint": {"best": "validation/sort/outcome"}},
            "and outcome compares each version with a changing one; choose a metric of a single version",
        ),
        (
            {
                "checkpoint": {"best": "validation/sort/accuracy", "every": 7},
                "validation": {"every": 50},
                "trainer": {"steps": 300},
            },
            "of 300 steps only the last would be both: checkpoint.every is 7 and validation.every is 50",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(table, message):
    host = PluginHost.discover(None)
    with pytest.raises(GrpoError) as raised:
        make(build([SORT, table]), host)
    assert message in str(raised.value)


def test_the_metric_of_a_set_can_be_the_best_and_the_goal():
    validation = {"every": 0, "sets": {"a": {"task": "sort", "every": 3}}}
    goals = {
        "checkpoint": {"best": "validation/a/accuracy"},
        "trainer": {"stop_when": "validation/a/reward>=1"},
    }
    make(build([SORT, goals, {"validation": validation}]), PluginHost.discover(None))


def test_a_validation_of_other_sets_says_nothing_about_the_best_checkpoint(tmp_path):
    retention = Retention(tmp_path, best="validation/bench/accuracy")
    retention.metrics(1, {"validation/bench/accuracy": 0.5})
    retention.metrics(2, {"validation/sort/accuracy": 0.9})
    assert retention.scores == {1: 0.5}
    with pytest.raises(GrpoError, match="which validation does not measure"):
        retention.metrics(3, {"validation/bench/reward": 0.5})


# ---------------------------------------------------------------------------------- when


@given(every=st.integers(0, 6), at_start=st.booleans(), last=st.integers(1, 20))
def test_the_first_version_is_due_by_choice_and_the_last_one_in_any_case(every, at_start, last):
    due = [version for version in range(last + 1) if Interval(every, at_start).due(version, last=last)]
    if not every:
        assert due == []
        return
    assert due[-1] == last
    assert (0 in due) == at_start
    assert set(due) - {0, last} == {version for version in range(1, last) if version % every == 0}


def held_out(set_name, name, /, **validation):
    environment = FakeEnvironment()
    prompts = [Prompt(messages=f"{name}{i}", id=str(i), environment=name) for i in range(3)]
    return HeldOut(
        name=set_name,
        config=ValidationConfig(**validation),
        prompts={name: prompts},
        environments={name: environment},
    )


def test_a_version_is_measured_by_what_is_due_and_all_transcripts_are_one_event():
    async def story():
        engine = FakeEngine()
        played = []
        host = PluginHost.discover(None)
        made = {"": ("greedy", {}), "bench": ("batched", {"n": 2})}
        setup = RunSetup(build([SORT]), host)
        setup.strategies = {
            key: host.make("validation_strategy", name, **options) for key, (name, options) in made.items()
        }
        validation = making.validation(
            setup,
            making.playing(RolloutConfig(), {}, FakeRenderer(), seed=0),
            [
                held_out("", "sort", every=2, at_start=False),
                held_out("bench", "bench", every=3, name="batched", options={"n": 2}),
            ],
            engine,
            last=7,
            emit=played.append,
        )
        measured = {}
        for version in (0, 2, 3, 6, 7):
            engine.version = version
            measured[version] = sorted(await validation(version))
        return measured, played

    measured, played = run(story())
    assert measured == {0: ["bench"], 2: ["sort"], 3: ["bench"], 6: ["bench", "sort"], 7: ["bench", "sort"]}
    assert all(isinstance(event, ValidationPlayed) for event in played)
    both = played[-1].groups
    sizes = {
        name: [len(g.rollouts) for g in both if g.prompt.environment == name] for name in ("sort", "bench")
    }
    assert sizes == {"sort": [1, 1, 1], "bench": [2, 2, 2]}


# ---------------------------------------------------------------------------------- laws


SECTION = {"every": 2, "at_start": False, "sets": {"bench": {"every": 4}, "start": {"at_start": True}}}


def terms():
    table = {
        "trainer": {"prompts_per_step": 2, "steps": 9},
        "pipeline": {"max_staleness": 0, "policy": "in_order"},
        "rollout": {"max_retries": 0, "group_size": 2},
        "validation": SECTION,
    }
    return Terms.of(table)


def test_the_laws_know_which_sets_are_due():
    due = {version: terms().due(version) for version in (0, 1, 2, 4, 9)}
    everything = {"", "bench", "start"}
    assert due == {0: {"start"}, 1: set(), 2: {"", "start"}, 4: everything, 9: everything}


@pytest.mark.parametrize(
    ("version", "results", "holds"),
    [
        (4, {"sort", "bench", "start"}, True),
        (4, {"bench", "start"}, True),  # no task has held-out prompts
        (4, {"sort", "start"}, False),
        (2, {"sort", "bench", "start"}, False),
        (0, {"start"}, True),
        (0, {"sort", "start"}, False),
    ],
)
def test_a_set_that_is_left_out_or_not_due_breaks_the_law(version, results, holds):
    laws = Laws()
    laws.terms = terms()
    laws._now.version = version
    laws.observe(
        {"event": "Validated", "step": version, "version": version, "results": {name: {} for name in results}}
    )
    assert [violation.law for violation in laws.violations] == ([] if holds else ["validation"])


# ---------------------------------------------------------------------------------- a run

BENCH = """
import grpo_core as grpo

class Held(grpo.Environment):
    success = 1.0
    def __init__(self, only: str = ""):
        pass
    def prompts(self, split):
        if split != "validation":
            raise ValueError("nothing is trained on")
        return [grpo.Prompt(messages=f"{i}=", answer=str(i)) for i in range(6)]
    def evaluate(self, episodes):
        return [float(len(e.reply) % 2) for e in episodes]
"""
ROWS = [{"prompt": f"{i}=", "answer": "1"} for i in range(5)]
CONFIG = """
[tasks.sort]
env = "math:sort"
options = { length = 3 }

[trainer]
steps = 4
prompts_per_step = 4

[validation]
every = 2
prompts = 8
at_start = false

[validation.sets.bench]
env = "./bench.py:Held"
name = "batched"
options = { n = 3, temperature = 0.7 }
every = 3
at_start = true

[validation.sets.rows]
env = "./bench.py:Held"
env_options = { only = "rows" }
data = "rows.jsonl"
every = 0

[validation.sets.sort4]
task = "sort"
name = "pass_at_k"
options = { k = [1, 4] }
prompts = 5
"""


@pytest.fixture(scope="module")
def a_run(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("sets")
    (cwd / "bench.py").write_text(BENCH)
    (cwd / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (cwd / "run.toml").write_text(CONFIG)
    done = grpo(cwd, "train", "run.toml", "--output", "run", "--set", "model.options.warm_start_steps=5")
    assert done.returncode == 0, done.stderr
    return cwd / "run"


@pytest.mark.long
def test_each_set_is_measured_at_its_own_steps_and_the_laws_hold(a_run):
    rows = [json.loads(line) for line in (a_run / "metrics.jsonl").read_text().splitlines()]
    measured = {
        row["step"]: sorted({name.split("/")[1] for name in row if name.startswith("validation/")})
        for row in rows
        if any(name.startswith("validation/") for name in row)
    }
    assert measured == {0: ["bench"], 2: ["sort", "sort4"], 3: ["bench"], 4: ["bench", "sort", "sort4"]}
    found = verified(a_run)
    assert not found.findings, found


@pytest.mark.long
def test_transcripts_of_all_sets_are_stored_and_shown(a_run):
    groups = stored_rollouts(a_run, 4, validation=True)
    sizes = {}
    for group in groups:
        sizes.setdefault(group.prompt.environment, []).append(len(group.rollouts))
    assert sizes == {"sort": [1] * 8, "bench": [3] * 6, "sort4": [4] * 5}
    page = (a_run / "report.html").read_text()
    browser = page[page.index('id="browser"') :]
    held = json.loads(re.search(r'<script type="application/json">(.*?)</script>', browser, re.DOTALL)[1])
    newest = [group for group in held["groups"] if (group["set"], group["step"]) == ("validation", 4)]
    assert {group["task"] for group in newest} == {"sort", "bench", "sort4"}


@pytest.mark.slow
def test_validate_measures_sets_by_name_also_those_that_the_run_leaves_out(a_run):
    done = grpo(a_run.parent, "validate", "run", "--only", "bench", "--only", "rows", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert {name: found["prompts"] for name, found in told["results"].items()} == {"bench": 6, "rows": 5}
    of_task = grpo(a_run.parent, "validate", "run", "--only", "sort4", "--json")
    assert list(json.loads(of_task.stdout)["results"]) == ["sort4"], of_task.stderr
    assert told["validation"] == {"bench": "batched", "rows": "batched"}
    rows = [json.loads(line) for line in (a_run / "metrics.jsonl").read_text().splitlines()]
    last = next(row for row in reversed(rows) if "validation/bench/accuracy" in row)
    assert last["validation/bench/accuracy"] == told["results"]["bench"]["accuracy"], (
        "same seeds, same weights"
    )


@pytest.mark.slow
def test_validate_measures_the_tasks_and_all_sets_without_a_name(a_run):
    done = grpo(a_run.parent, "validate", "run")
    assert done.returncode == 0, done.stderr
    first, _, _, *rows = done.stdout.splitlines()
    assert first == "run, version 4, measured by batched, pass_at_k"
    assert [row.split()[0] for row in rows if not row.startswith(" ")] == ["sort", "bench", "rows", "sort4"]


@pytest.mark.long
def test_an_unknown_name_is_refused_with_those_that_there_are(a_run):
    done = grpo(a_run.parent, "validate", "run", "--only", "aime")
    assert done.returncode == 2
    assert (
        "--only aime: is neither a task nor a validation set; expected one of sort, bench, rows, sort4"
        in done.stderr
    )


@pytest.mark.long
def test_a_set_without_prompts_is_named(tmp_path):
    (tmp_path / "bench.py").write_text(BENCH.replace("range(6)", "range(0)"))
    done = grpo(tmp_path, "train", "--env", "math:sort", "--output", "run",
        "--set", "validation.sets.bench.env=./bench.py:Held")  # fmt: skip
    assert done.returncode == 2
    assert "validation.sets.bench: there are no prompts for validation" in done.stderr


# ---------------------------------------------------------------------------------- after a resume


@pytest.mark.nightly
def test_the_best_version_is_compared_with_after_a_resume(tmp_path):
    """It is known for the tasks and for a set, in a second process."""
    common = ["--set", "trainer.prompts_per_step=4", "--set", "model.options.warm_start_steps=5"]
    done = grpo(tmp_path, "train", "--env", "math:sort", "--validation", "paired", "--output", "run", *common,
        "--set", "trainer.steps=2", "--set", "validation.every=2", "--set", "validation.prompts=20",
        "--set", "validation.sets.b.env=math:reverse", "--set", "validation.sets.b.every=1")  # fmt: skip
    assert done.returncode == 0, done.stderr
    again = grpo(tmp_path, "train", "--resume", "run", "--set", "trainer.steps=4")
    assert again.returncode == 0, again.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for name, steps in (("sort", {2, 4}), ("b", {1, 2, 3, 4})):
        standards = {row["step"]: row[key] for row in rows if (key := f"validation/{name}/standard") in row}
        assert set(standards) == steps, f"{name}: compared from the second validation on: {standards}"
    saved = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))[-1]
    state = json.loads((saved / "pipeline.json").read_text())["validation"]
    assert set(state) == {"", "b"}
    strategy, of_tasks = state["b"]
    assert strategy == "paired"
    assert set(of_tasks) == {"b"}
    other = grpo(tmp_path, "train", "--resume", "run", "--set", "trainer.steps=5",
        "--set", "validation.sets.b.name=greedy")  # fmt: skip
    assert other.returncode == 0, other.stderr
    told = "validation strategy 'greedy' of the set 'b' is new since the checkpoint, which is of 'paired'"
    assert told in other.stdout + other.stderr
