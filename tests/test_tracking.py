"""The files of a run and its terminal view."""

from __future__ import annotations

import gzip
import io
import json
import re
from pathlib import Path

import pytest
from documents import ROOT
from recording import add, record
from rich.cells import cell_len
from rich.console import Console

from grpo_core import Run
from grpo_core.config import Config, TaskConfig, TrackingConfig, TrainerConfig, as_table
from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.contracts.events import (
    GroupFinished,
    GroupsReady,
    IncidentReported,
    LineShown,
    PromptSkipped,
    RunEnded,
    RunStarted,
    Saved,
    Saving,
    StageBegan,
    StatusChanged,
    StepEnded,
    Validated,
    WarningRaised,
)
from grpo_core.contracts.records import Group, Prompt, Rollout, RunInfo, Segment
from grpo_core.contracts.tokens import Tokens
from grpo_core.reporting.terminal import Now, TerminalTracker, sparkline
from grpo_core.reporting.trackers import call
from grpo_core.storage.run_directory import RunDirectory
from grpo_core.testing import make_offer, prompts
from grpo_core.validation.results import progress


def groups():
    rollout = Rollout(
        segments=[Segment(prompt_ids=(1,), tokens=Tokens.generated([2, 3], [-0.5, -0.5], [0, 0]))],
        messages=({"role": "user", "content": "52341="}, {"role": "assistant", "content": "12345"}),
        reward=1.0,
        turns=1,
        finish_reason="stop",
    )
    prompt = prompts(1)[0]
    return (Group(prompt=prompt, rollouts=(rollout,) * 2, generation_version=0, target_version=1, slot=0),)


EVENTS = [
    RunStarted(directory="d", config={}),
    Validated(
        step=0,
        version=0,
        results={"sort": {"accuracy": 0.04, "accuracy_low": 0.01, "accuracy_high": 0.09, "reward": 0.04}},
    ),
    GroupsReady(step=0, groups=groups()),
    StepEnded(
        step=1,
        metrics={
            "reward/sort": 0.25,
            "groups/sort": 1.0,
            "completion_tokens/sort": 5.0,
            "loss": float("nan"),
            "staleness_max": 1.0,
        },
    ),
    PromptSkipped(step=1, task="sort", prompt="7", error="ValueError: bad row"),
    Validated(step=1, version=1, results={"sort": {"accuracy": 0.9}}),
]


WRITTEN = len(EVENTS) + 3
"""Lines of events.jsonl: the events, Opened, and Recorded for the texts and tokens of a step."""


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def rollouts(path):
    return [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()]


FILES = Config(tracking=TrackingConfig(trackers=["files"]))


def recorded(tmp_path):
    return record(tmp_path / "run", EVENTS, FILES)


def test_everything_that_happens_is_on_disk(tmp_path):
    run = recorded(tmp_path)
    metrics = lines(run.path / "metrics.jsonl")
    assert [
        (row["step"], row.get("validation/sort/accuracy"), row.get("reward/sort")) for row in metrics
    ] == [
        (0, 0.04, None),
        (1, None, 0.25),
        (1, 0.9, None),
    ]
    assert metrics[1]["loss"] is None, "JSON has no NaN"
    (first, second) = rollouts(run.path / "rollouts" / "step-000001.jsonl.gz")
    own = {"info": {}, "prompt_hint": None}
    assert first == second | own, "the first line of a group has what its prompt has alone"
    assert first["messages"][-1]["content"] == "12345"
    assert first["reward"] == 1.0
    opened, *events = lines(run.path / "events.jsonl")
    assert (opened["event"], opened["step"]) == ("Opened", -1)
    assert [event["event"] for event in events if event["event"] != "Recorded"] == [
        type(event).__name__ for event in EVENTS
    ]
    assert events[2]["groups"] == [
        {
            "slot": 0,
            "task": "task",
            "prompt": "0",
            "generation_version": 0,
            "target_version": 1,
            "token_versions": [0, 0],
            "rewards": [1.0, 1.0],
        }
    ]


def test_records_after_the_resumed_step_are_removed(tmp_path):
    run = recorded(tmp_path)
    with open(run.path / "metrics.jsonl", "a") as file:
        file.write('{"step": 2, "half a li')
    run.forget_after(0, 0)
    assert [row["step"] for row in lines(run.path / "metrics.jsonl")] == [0]
    assert list((run.path / "rollouts").iterdir()) == []
    assert len(lines(run.path / "events.jsonl")) == WRITTEN, "events are append-only"


def test_a_validation_that_ended_after_its_checkpoint_was_cut_is_made_again_and_has_one_line(tmp_path):
    run = recorded(tmp_path)
    run.forget_after(1, 0)
    kept = [(row["step"], "reward/sort" in row) for row in lines(run.path / "metrics.jsonl")]
    assert kept == [(0, False), (1, True)]


def test_a_directory_that_holds_another_run_is_refused(tmp_path):
    run = recorded(tmp_path)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match=r"holds another run; give another directory, or .* --resume"):
        RunDirectory.create(run.path, Config())
    assert before == {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("42")
    with pytest.raises(ConfigError, match="is not empty"):
        RunDirectory.create(tmp_path / "other", Config())


def test_a_directory_without_a_run(tmp_path):
    with pytest.raises(ConfigError, match=r"is not a run \(there is no config\.toml in it\)"):
        RunDirectory.open(tmp_path)
    with pytest.raises(ConfigError, match="there is no run with a checkpoint in"):
        RunDirectory.latest(tmp_path)


def shown(*, terminal, events=EVENTS, view="live", config=None, width=100, environ=None):
    out = io.StringIO()
    tracker = on(out, terminal=terminal, view=view, config=config, width=width, environ=environ)
    for event in events:
        call(tracker, event)
    tracker.close()
    return out.getvalue()


def on(out, *, terminal, view="live", config=None, width=100, environ=None, **run):
    """A tracker that writes into a stream."""

    class Terminal(TerminalTracker):
        @staticmethod
        def make_console():
            return Console(
                file=out, force_terminal=terminal, width=width, color_system=None, _environ=environ or {}
            )

    config = as_table(config or Config(trainer=TrainerConfig(steps=10)))
    return Terminal(RunInfo(**{"name": "run", "directory": Path("run"), "config": config} | run), view=view)


def test_without_a_terminal_there_is_a_line_for_each_thing_that_happens():
    text = shown(terminal=False)
    assert "validation of version 0: sort: accuracy 4.0% (1.0% to 9.0%), reward 0.04" in text
    assert "step 1/10  reward 0.250" in text


LACKING = [
    Validated(version=0, results={"sort": {"accuracy": 0.4, "accuracy_low": 0.3, "accuracy_high": 0.5}}),
    Validated(
        version=1,
        results={
            "sort": {"accuracy_low": 0.2, "accuracy_high": 0.75, "errors": 11.0, "unscored": 0.55},
            "essay": {"completion_tokens": 20.0, "errors": 11.0, "unscored": 0.55},
        },
    ),
]


def test_a_validation_that_lacks_scores_shows_bounds_or_no_score():
    assert shown(terminal=False, events=LACKING).splitlines()[1:] == [
        "validation of version 1: sort: accuracy 20.0% to 75.0% (no score), errors 11, unscored 55.0%",
        "validation of version 1: essay: no score, completion_tokens 20, errors 11, unscored 55.0%",
    ]
    text = " ".join(shown(terminal=True, events=LACKING).split())
    assert "validation sort 20.0% to 75.0% (55% unscored) ▄" in text
    assert "validation essay no score (55% unscored)" in text


def test_in_a_terminal_the_view_shows_progress_reward_validation_and_a_sample():
    text = shown(terminal=True)
    for part in (
        "step 1/10",
        "validation sort",
        "90.0%",
        "▁▇",
        "reward",
        "staleness",
        "tokens/s",
        "prompt 0 → 12345",
    ):
        assert part in text, part


def test_a_sample_of_a_chat_is_the_reply_and_the_end_of_its_question():
    """A long system prompt hid the reply."""
    asked = [
        {"role": "system", "content": "Be helpful. " * 20},
        {"role": "user", "content": "Why? " * 9 + "6 x 7?"},
    ]
    rollout = Rollout(messages=(*asked, {"role": "assistant", "content": "It is\n42."}), reward=1.0)
    group = Group(prompt=Prompt(messages=asked, id="a", environment="sort"), rollouts=(rollout,),
                  generation_version=0, target_version=0)  # fmt: skip
    lines = shown(terminal=True, events=[GroupsReady(step=0, groups=(group,))], width=80).splitlines()
    (sample,) = (line for line in lines if line.startswith("sample"))
    assert " ".join(sample.split()) == "sample 1 Why? Why? 6 x 7? → It is 42."


def test_lines_may_be_wanted_in_a_terminal_too():
    assert shown(terminal=True, view="lines") == shown(terminal=False)


def test_a_line_of_a_tracker_stays_in_the_view_until_it_has_another_text():
    events = [
        LineShown(name="cost", text="12 USD"),
        LineShown(name="cost", text="13 USD\x1b[2J"),
    ]  # of a hostile currency
    assert shown(terminal=False, events=events).splitlines() == ["cost: 12 USD", "cost: 13 USD␛[2J"]
    view = shown(terminal=True, events=events)
    assert re.search(r"^cost +13 USD", view, re.M)
    assert "12 USD" not in view.splitlines()[-1]


def test_a_quiet_view_says_what_went_wrong_and_nothing_else():
    assert shown(terminal=True, view="quiet") == ""
    assert shown(terminal=True, view="quiet", events=INCIDENTS) == shown(terminal=False, events=INCIDENTS)


def test_events_are_printed_as_json_but_for_those_of_single_prompts():
    lines = [json.loads(line) for line in shown(terminal=True, view="json").splitlines()]
    kinds = [line["event"] for line in lines]
    assert "StepEnded" in kinds
    assert "GroupsReady" not in kinds
    step = next(line for line in lines if line["event"] == "StepEnded")
    assert step["step"] == 1
    assert step["metrics"]["reward/sort"] == 0.25
    assert step["metrics"]["loss"] is None, "JSON has no NaN"


def test_a_view_that_does_not_exist_is_named():
    with pytest.raises(PluginError, match="option 'view' is 'loud'; expected 'live' or 'lines' or 'quiet'"):
        make_offer("tracker", "terminal", None, view="loud")


def incident(time, kind="retried", *, count=1, component="engine 0"):
    return IncidentReported(
        step=3, time=time, kind=kind, component=component, message="status 503: full\nretry", count=count
    )


INCIDENTS = [incident(100.0), incident(101.0, "died"), incident(161.0, count=13),
             RunEnded(step=10, reason="finished")]  # fmt: skip


def test_an_incident_is_a_line_and_the_end_has_the_numbers():
    assert shown(terminal=False, events=INCIDENTS).splitlines() == [
        "survived, step 3: engine 0: status 503: full retry",
        "survived, step 3: engine 0: status 503: full retry",
        "survived, step 3: engine 0: status 503: full retry (13 times)",
        "recovered in this run from 14 repeated calls, 1 dead process (events.jsonl has each)",
    ]


def test_the_live_view_counts_incidents_by_kind_when_there_are_any():
    assert "recovered" not in shown(terminal=True)
    text = " ".join(shown(terminal=True, events=INCIDENTS[:-1]).split())
    assert "recovered from 14 repeated calls, 1 dead process" in text


def test_with_several_tasks_each_has_a_line_in_the_view():
    one = {
        "reward": 0.25,
        "accuracy": 0.2,
        "groups": 12.0,
        "completion_tokens": 6.0,
        "filtered_fraction": 0.25,
    }
    metrics = {f"{name}/{task}": value for name, value in one.items() for task in ("sort", "tool")}
    metrics |= {"staleness/sort": 0.5, "staleness/tool": 0.75, "time/step": 1.0}
    text = " ".join(shown(terminal=True, events=[StepEnded(step=1, metrics=metrics)]).split())
    assert "sort 0.250 ▃ accuracy 20%, 12 groups, 6 tokens, 25% filtered" in text
    assert "tool 0.250 ▃ accuracy 20%, 12 groups, 6 tokens, 25% filtered" in text


def of_tasks(groups=8.0, **rewards):
    """A step of several tasks with these rewards."""
    metrics = {"time/step": 1.0}
    for task, reward in rewards.items():
        metrics |= {f"groups/{task}": groups, f"completion_tokens/{task}": 6.0, f"staleness/{task}": 0.5}
        metrics |= {} if reward is None else {f"reward/{task}": reward}
    return metrics


def config_of(*tasks):
    return Config(
        trainer=TrainerConfig(steps=10), tasks={task: TaskConfig(env=f"math:{task}") for task in tasks}
    )


def test_a_second_task_that_joins_changes_no_mean_of_rewards():
    """Each task has its own mean, and the number of groups behind it."""
    events = [
        StepEnded(step=1, metrics=of_tasks(16, sort=0.85)),
        StepEnded(step=2, metrics=of_tasks(8, sort=0.85, reverse=0.05)),
        StepEnded(step=3, metrics=of_tasks(8, sort=0.9, reverse=None)),
    ]
    text = shown(terminal=False, events=events, config=config_of("sort", "reverse"))
    assert [line.partition("  staleness")[0] for line in text.splitlines()] == [
        "step 1/10  reward sort 0.850 x 16",
        "step 2/10  reward reverse 0.050 x 8, sort 0.850 x 8",
        "step 3/10  reward reverse none x 8, sort 0.900 x 8",
    ]
    drawn = " ".join(shown(terminal=True, events=events, config=config_of("sort", "reverse")).split())
    assert "reward sort 0.900 " in drawn
    assert "reward reverse 0.050 " in drawn
    assert "reward 0." not in drawn, "there is no mean over tasks"


def test_a_step_without_a_reward_does_not_show_the_reward_0():
    text = shown(terminal=False, events=[StepEnded(step=1, metrics=of_tasks(8, sort=None))])
    assert "reward none  staleness" in text


def test_an_accuracy_and_the_parts_of_a_reward_stand_next_to_it():
    """A part that is gamed shows there, while the accuracy stays at 0."""
    parts = {"feedback_format/sums": 0.9871, "feedback_value/sums": 0.0, "std_feedback_value/sums": 0.1}
    step = StepEnded(step=1, metrics=of_tasks(8, sums=0.3) | {"accuracy/sums": 0.0} | parts)
    text = shown(terminal=False, events=[step])
    assert "reward 0.300, accuracy 0%, format 0.987, value 0  staleness" in text
    drawn = " ".join(shown(terminal=True, events=[step]).split())
    assert "accuracy 0%, format 0.987, value 0, 8 groups" in drawn
    same = StepEnded(step=1, metrics=of_tasks(8, sums=0.3) | {"accuracy/sums": 0.3})
    assert "accuracy" not in shown(terminal=False, events=[same])


def test_a_reward_stands_next_to_an_accuracy_where_they_differ():
    first, last = {"accuracy": 0.0, "reward": 0.013}, {"accuracy": 0.0, "reward": 0.3}
    assert progress(first, last) == "accuracy 0.0% -> 0.0%, reward 0.013 -> 0.3"
    assert (
        progress({"accuracy": 0.2, "reward": 0.2}, {"accuracy": 0.5, "reward": 0.5})
        == "accuracy 20.0% -> 50.0%"
    )


def test_a_run_with_one_validation_shows_its_result_once():
    only = {"accuracy": 0.2, "reward": 0.3}
    assert progress(only, only) == "accuracy 20.0%"
    assert progress(only, {**only}) == "accuracy 20.0% -> 20.0%, reward 0.3 -> 0.3"


def test_the_largest_of_many_tasks_are_named_and_the_others_are_counted():
    metrics = of_tasks(2, **{f"t{i}": 0.5 for i in range(9)}) | {"groups/t7": 30.0}
    (line,) = shown(terminal=False, events=[StepEnded(step=1, metrics=metrics)]).splitlines()
    assert (
        "reward t0 0.500 x 2, t1 0.500 x 2, t2 0.500 x 2, t3 0.500 x 2, t4 0.500 x 2, t7 0.500 x 30" in line
    )
    assert "and 3 more tasks x 6  staleness" in line


def test_a_reward_of_filtered_groups_says_how_many_were_left_out():
    """Dynamic sampling trains what it has chosen: its mean reward stays near 0.5 while the model learns."""
    metrics = of_tasks(8, sort=0.5) | {"filtered_fraction/sort": 0.62}
    assert "reward 0.500 (62% filtered)" in shown(terminal=False, events=[StepEnded(step=1, metrics=metrics)])


def test_each_task_has_a_picture_of_its_reward():
    both = [StepEnded(step=i + 1, metrics=of_tasks(sort=i / 7, sum=1 - i / 7)) for i in range(8)]
    text = " ".join(shown(terminal=True, events=both).split())
    assert "sort 1.000 ▁▂▃▄▅▆▇█ " in text
    assert "sum 0.000 █▇▆▅▄▃▂▁ " in text


def test_no_name_and_no_value_is_cut():
    events = [*EVENTS, StepEnded(step=2, metrics=of_tasks(sort=0.25, arithmetic_with_tools=0.75))]
    drawn = re.sub(r"\x1b\[[?\d]*[a-zA-Z]", "", shown(terminal=True, events=events, width=100))
    assert all(cell_len(line) <= 100 for line in drawn.splitlines())
    assert "…" not in drawn.replace("prompt 0", "")
    words = "".join(drawn.split())
    for part in ("step2/10", "validationsort90.0%", "arithmetic_with_tools0.750", "staleness0.00"):
        assert part in words, part


def test_a_terminal_without_room_for_a_live_view_shows_lines():
    assert "step 1/10  reward" in shown(terminal=True, width=79)
    assert "━" not in shown(terminal=True, width=79)


STAGES = {
    "first weight sync": "giving the engine the weights of version 0",
    "first validation": "validating version 0 before the first step",
    "wait for groups": "waiting for groups: 1 of 3 are ready",
    "step": "training step 1",
    "publish": "publishing the weights of step 1",
    "wait for validation": "training waits for a validation",
    "wait for the weight sync": "waiting until the engine has the newest weights",
    "cut of the checkpoint": "taking a checkpoint of step 0",
    "a {new} stage": "a {new} stage",
}


@pytest.mark.parametrize(("stage", "words"), STAGES.items())
def test_the_live_view_says_in_which_stage_the_loop_is(stage, words):
    config = {"trainer": {"steps": 9, "prompts_per_step": 3}}
    events = [
        RunStarted(directory="d", config=config),
        GroupFinished(step=0, slot=0, task="sort", prompt="1"),
        StageBegan(stage=stage),
    ]
    assert f"now {words}" in " ".join(shown(terminal=True, events=events).split())


def test_a_dumb_terminal_shows_the_lines_of_a_pipe():
    assert shown(terminal=True, environ={"TERM": "dumb"}).split() == shown(terminal=False).split()


def test_lines_are_wrapped_at_words_on_a_terminal_and_nowhere_else():
    words = "the evaluate method of the environment ./with/a/name/that/is/longer/than/a/whole/line.py failed"
    warned = [WarningRaised(cause="x", message=words)]
    lines = shown(terminal=True, view="lines", events=warned, width=40).splitlines()
    assert [word for line in lines for word in line.split()] == f"warning, step 0: {words}".split()
    assert [len(line) <= 40 for line in lines] == [True, True, False, True]
    assert shown(terminal=False, events=warned, width=40) == f"warning, step 0: {words}\n"


def resumed(run, *events, measured):
    """The view of a run that continues after step 1."""
    out = io.StringIO()
    tracker = on(out, terminal=True, directory=run.path, resumed_from=1, validated=measured)
    for event in (StatusChanged(message="loading the model"), *events):
        tracker.event(event)
    tracker.close()
    return " ".join(out.getvalue().split())


def test_a_resumed_run_shows_its_earlier_curves_and_its_last_validation(tmp_path):
    run = recorded(tmp_path)
    drawn = resumed(run, measured=1)
    assert "step 1/10" in drawn, "before the first step of this start"
    assert "validation sort 90.0% ▁▇" in drawn
    step = StepEnded(step=2, metrics={"reward/sort": 1.0, "groups/sort": 1.0, "completion_tokens/sort": 6.0})
    assert "reward sort 1.000 ▃█" in resumed(run, step, measured=1)


def test_a_validation_that_a_resumed_run_makes_again_is_not_drawn_twice(tmp_path):
    assert "validation sort 4.0% ▁" in resumed(recorded(tmp_path), measured=0)


def test_the_clock_runs_from_the_start_of_the_program_and_not_from_the_first_step(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("grpo_core.reporting.terminal.time.monotonic", clock)
    out = io.StringIO()
    tracker = on(out, terminal=True)
    clock.now = 18.0
    tracker.event(RunStarted(directory="d", config={}))
    clock.now = 20.0
    tracker.close()
    assert " 0:20" in out.getvalue()
    assert " 0:02" not in out.getvalue()


def test_a_download_has_a_bar_until_it_ends():
    fetching = StatusChanged(message="fetching the model, 40 of 80 MB", part=0.5)
    drawn = " ".join(shown(terminal=True, events=[fetching]).split())
    assert f"now fetching the model, 40 of 80 MB {'━' * 16}{'╌' * 16}" in drawn
    assert "╌" not in shown(terminal=True, events=[fetching, StatusChanged(message="loading the model")])
    assert shown(terminal=False, events=[fetching]) == "fetching the model, 40 of 80 MB\n"


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_seconds_of_the_current_stage_and_of_a_checkpoint_during_it_are_shown():
    clock = Clock()
    now = Now(clock)
    now.receive(StatusChanged(message="loading the model"))
    assert now.text() == "loading the model"
    clock.now = 12.4
    assert now.text() == "loading the model (12 s)"
    now.receive(Saving(step=4))
    now.receive(StageBegan(stage="step"))
    clock.now += 3.0
    assert (now.text(), now.checkpoint()) == ("training step 1 (3 s)", "writing step 4 (3 s)")
    now.receive(Saved(step=4, directory="step-000004"))
    assert now.checkpoint() == ""


def test_the_number_of_ready_groups_is_that_of_the_buffer():
    """A resumed run has some already, a step takes some, and those that are generated ahead stay."""
    now = Now()
    config = {"trainer": {"steps": 9, "prompts_per_step": 2}, "pipeline": {"policy": "in_order"}}
    now.receive(RunStarted(directory="d", config=config, buffer={"ready": 1}))
    now.receive(StageBegan(stage="wait for groups"))
    assert now.text() == "waiting for groups: 1 of 2 are ready"
    for slot in range(3):
        now.receive(GroupFinished(slot=slot, task="sort", prompt="1"))
    assert now.text() == "waiting for groups: 4 are ready, but not all of the next 2"
    now.receive(GroupsReady(step=0, groups=groups() * 3))
    now.receive(StageBegan(step=1, stage="wait for groups"))
    assert now.text() == "waiting for groups: 1 of 2 are ready"


def steps(seconds, *, start=1000.0):
    """A run whose steps take these seconds, half of them waiting for groups."""
    yield RunStarted(directory="d", config={}, time=start)
    for step, each in enumerate(seconds, 1):
        start += each
        yield StepEnded(
            step=step,
            time=start,
            metrics={"time/step": each, "time/wait_for_groups": each / 2, "time/train": 1.0},
        )
        yield StageBegan(step=step, stage="wait for groups")


def test_the_time_that_is_left_follows_the_last_steps():
    told = [line.rpartition(" s")[2] for line in shown(terminal=False, events=steps([10.0] * 2)).splitlines()]
    assert told == [", about 1:30 left", ", about 1:20 left"]
    *_, last = shown(
        terminal=False,
        events=steps([900.0] * 5 + [3600.0] * 20),
        config=Config(trainer=TrainerConfig(steps=27)),
    ).splitlines()
    assert last.endswith(" s, about 2:00:00 left")


def test_without_a_number_of_steps_no_end_is_shown():
    """A run of epochs knows the number when it has started, and the event says it."""
    unknown = Config(trainer=TrainerConfig(steps=1, epochs=2.0))
    text = shown(terminal=False, events=steps([10.0] * 9), config=unknown)
    assert [line[:8] for line in text.splitlines()] == [f"step {step}  " for step in range(1, 10)]
    assert "left" not in text
    assert "now waiting for the groups of step 10" in " ".join(
        shown(terminal=True, events=steps([10.0] * 9), config=unknown).split()
    )
    known = as_table(Config(trainer=TrainerConfig(steps=12, epochs=2.0)))
    started = [RunStarted(directory="d", config=known, time=1000.0), *list(steps([10.0] * 9))[1:]]
    *_, last = shown(terminal=False, events=started, config=unknown).splitlines()
    assert last.startswith("step 9/12  ")
    assert last.endswith(", about 0:30 left")


def test_the_live_view_says_what_the_run_waits_for():
    text = " ".join(shown(terminal=True, events=steps([10.0] * 3)).split())
    assert "now waiting for the groups of step 4" in text
    assert "waiting 50% for replies; at work: engine 0%, trainer 10%" in text
    ready = [*steps([10.0]), GroupsReady(step=1, groups=groups()), StageBegan(step=1, stage="step")]
    assert "now training step 2" in " ".join(shown(terminal=True, events=ready).split())
    ended = [*ready, RunEnded(step=1, reason="finished")]
    assert "training step" not in shown(terminal=True, events=ended)


def rows_of(view):
    """The names of a view's rows, which end in two spaces; above them is the line of progress."""
    rows = view.rpartition("grpo-core ")[2].partition("```")[0].splitlines()[1:]
    return [name[1] for row in rows if (name := re.match(r"(\S.*?)  ", row))]


def test_the_readme_shows_the_rows_that_are_drawn():
    readme = (ROOT / "README.md").read_text()
    printed = readme[: readme.index("The end shows what")]
    assert rows_of(printed) == rows_of(shown(terminal=True))


def test_a_sparkline_shows_the_last_values_between_its_bounds():
    assert sparkline([0.0, 0.5, 1.0, 2.0]) == "▁▅██"
    assert len(sparkline([0.5] * 100)) == 32
    assert sparkline([]) == ""


def test_half_a_last_line_is_tolerated_and_any_other_damage_is_an_error(tmp_path):
    run = recorded(tmp_path)
    with open(run.path / "events.jsonl", "a") as file:
        file.write('{"event": "StepEn')
    assert len(list(Run(run.path).events())) == WRITTEN
    add(run, EVENTS[:1], FILES)
    assert [event["event"] for event in Run(run.path).events()][-2:] == ["Opened", "RunStarted"]
    assert len(list(Run(run.path).events())) == WRITTEN + 2
    path = run.path / "events.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b"x" * 200_000)
    add(run, [], FILES)
    assert path.read_bytes().startswith(whole), "half a line of any length is cut off"
    path.write_text(path.read_text().replace('"event": "GroupsReady"', "GroupsReady"))
    with pytest.raises(ConfigError, match=r"events\.jsonl, line 4: cannot be read"):
        list(Run(run.path).events())
