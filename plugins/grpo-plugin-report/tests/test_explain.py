"""``grpo-core explain`` names each cause on a run that has it, and none on a healthy run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from attrs import evolve
from markupsafe import escape
from simulation.broken import BREAKS, write
from simulation.broken import CAUSES as SIMULATED_CAUSES

from grpo_core import ConfigError, Run
from grpo_plugin_report import report
from grpo_plugin_report.explain import command
from grpo_plugin_report.explain.decisions import CAUSES, explained
from grpo_plugin_report.explain.facts import Facts, Messages, Series, add_message

SEED = 58
"""A seed whose runs are small."""
QUICK = (
    "rewards_all_zero",
    "rollouts_unscored",
    "prompts_too_long",
    "few_different_prompts",
    "learning_rate_too_high",
    "learning_rate_too_low",
    "engine_logprobs_differ",
    "engine_has_old_weights",
    "environment_dies",
    "environment_is_the_bottleneck",
    "checkpoints_block",
    "disk_full",
    "killed",
)
"""Causes of every kind; `make test-fast` leaves the others out, which take a third of a second each."""
SIMULATED = [pytest.param(cause, marks=() if cause in QUICK else pytest.mark.long) for cause in BREAKS]


def named(path: Path) -> list[str]:
    return [finding.cause for finding in explained(Facts.read(Run(path, strict=False)))]


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in which nothing is wrong."""
    path = tmp_path_factory.mktemp("healthy") / "run"
    write(path, "healthy", SEED)
    return path


@pytest.mark.long
@pytest.mark.parametrize("cause", SIMULATED)
def test_a_run_that_is_broken_on_purpose_is_explained(cause: str, tmp_path: Path) -> None:
    write(tmp_path / "run", cause, SEED)
    assert named(tmp_path / "run")[0] == SIMULATED_CAUSES[cause]


@pytest.mark.long
def test_a_healthy_run_has_no_cause(healthy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.explain(healthy, as_json=False) == 0
    assert "nothing found" in capsys.readouterr().out


@pytest.mark.long
def test_the_report_of_a_run_shows_its_causes_and_none_of_a_healthy_one(
    tmp_path: Path, healthy: Path
) -> None:
    write(tmp_path / "run", "rewards_all_zero", SEED)
    (finding, *_) = explained(Facts.read(Run(tmp_path / "run", strict=False)))
    page = report.render(report.Files.read(tmp_path / "run"))
    for told in (finding.title, finding.cause, *finding.evidence, finding.fix):
        assert str(escape(told)) in page
    assert "grpo-core explain" not in report.render(report.Files.read(healthy))


@pytest.mark.long
def test_each_cause_has_three_different_lines_of_evidence_and_a_fix(tmp_path: Path) -> None:
    write(tmp_path / "run", "environment_dies", SEED)
    (finding, *_) = explained(Facts.read(Run(tmp_path / "run", strict=False)))
    assert len(set(finding.evidence)) == 3
    assert "grpo-core" in finding.fix


def test_the_list_names_each_cause_once_and_can_name_all_that_are_simulated() -> None:
    names = list(CAUSES)
    assert len(set(names)) == len(names) >= 30
    assert set(SIMULATED_CAUSES.values()) <= set(names)


@pytest.mark.long
def test_the_text_shows_three_causes_and_json_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "run", "no_stop_token", SEED)
    command.explain(tmp_path / "run", as_json=False)
    text = capsys.readouterr().out
    command.explain(tmp_path / "run", as_json=True)
    table = json.loads(capsys.readouterr().out)
    assert text.startswith("1. ")
    assert "fix: " in text
    assert table["findings"][0]["cause"] == "warned"
    assert len(table["findings"][0]["evidence"]) == 3


# ---------------------------------------------------------------------------------- damaged directories


@pytest.fixture
def run(healthy: Path, tmp_path: Path) -> Path:
    """A copy of the healthy run, to be damaged."""
    return shutil.copytree(healthy, tmp_path / "run")


def test_a_directory_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a run"):
        command.explain(tmp_path, as_json=False)


def test_a_directory_with_nothing_but_a_configuration_is_refused(run: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl", "timeline.jsonl"):
        (run / name).unlink()
    with pytest.raises(ConfigError, match="are missing, empty or damaged"):
        command.explain(run, as_json=False)


def test_half_lines_and_rubbish_are_counted_and_passed_over(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("metrics.jsonl", "timeline.jsonl", "events.jsonl"):
        with (run / name).open("ab") as file:
            file.write(
                b'[1, 2]\n\xff\xfe{"step": \n{"step": "x", "lane": 3, "busy": "no", "time/step": true}\n{"a'
            )
    assert command.explain(run, as_json=False) == 0
    said = capsys.readouterr()
    assert "nothing found" in said.out
    assert "3 lines of metrics.jsonl cannot be read" in said.err
    assert "3 lines of events.jsonl cannot be read" in said.err


def test_an_event_that_is_cut_off_is_counted_also_if_nobody_asks_for_its_kind(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = (run / "events.jsonl").read_text().splitlines(keepends=True)
    place = next(i for i, line in enumerate(events) if '"event": "Synced"' in line)
    events[place] = events[place][:-9] + "\n"
    (run / "events.jsonl").write_text("".join(events))
    command.explain(run, as_json=False)
    assert "1 line of events.jsonl cannot be read" in capsys.readouterr().err


def test_events_of_odd_types_do_no_harm(run: Path) -> None:
    events = (
        {"event": "Dispatched", "slots": [3, {"task": None, "prompt": []}]},
        {"event": "IncidentReported", "kind": None, "count": -5, "message": ["x"]},
        {"event": "WarningRaised", "cause": {}, "step": 1e400},
        {"event": "PromptSkipped"},
    )
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in events)
    assert named(run) == []


def test_a_configuration_of_odd_types_does_no_harm(run: Path) -> None:
    (run / "config.toml").write_text('trainer = 3\npipeline = "x"\n[rollout]\ngroup_size = "many"\n')
    assert named(run) == []


def test_a_configuration_that_cannot_be_read_is_said(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "config.toml").write_text("[[[")
    assert command.explain(run, as_json=False) == 0
    assert "config.toml cannot be read" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_without_events_is_explained_by_its_metrics(tmp_path: Path) -> None:
    write(tmp_path / "run", "learning_rate_too_low", SEED)
    (tmp_path / "run" / "events.jsonl").unlink()
    (tmp_path / "run" / "timeline.jsonl").unlink()
    assert named(tmp_path / "run")[0] == "learning_rate_too_low"
    assert "killed" not in named(tmp_path / "run"), "nobody knows how it ended"


def test_text_that_a_plugin_wrote_does_nothing_to_the_terminal(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    event = {"event": "ErrorRaised", "step": 3, "message": "\x1b[2Jgone", "fault": None}
    with (run / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    command.explain(run, as_json=False)
    said = capsys.readouterr().out
    assert "run_failed" in said
    assert "\x1b" not in said


def test_the_page_has_a_line_for_each_cause() -> None:
    page = (Path(__file__).parents[3] / "docs" / "explain.md").read_text(encoding="utf-8")
    missing = [
        name
        for name, cause in CAUSES.items()
        if f"| `{name}` | {(cause.__doc__ or '').strip()} |" not in page
    ]
    assert missing == []


# ---------------------------------------------------------------------------------- runs of other kinds


def of(config: dict[str, object] | None = None, **series: list[float]) -> Facts:
    """Facts of a run with these metrics, one value for each step."""
    facts = Facts(path=Path("run"), config=config or {}, started=1, ended="finished")
    for name, values in series.items():
        for step, value in enumerate(values, 1):
            facts.series.setdefault(name.replace("__", "/"), Series()).add(step, value)
    return facts


def causes(facts: Facts) -> list[str]:
    return [finding.cause for finding in explained(facts)]


def test_a_run_that_failed_before_its_first_step_has_its_error_and_nothing_else() -> None:
    facts = of({"trainer": {"updates_per_step": 8}})
    facts.ended, facts.error = "failed", Messages(1, 0, 0, "ModelError: there is no such file")
    assert causes(facts) == ["run_failed"]
    facts.ended = ""
    assert causes(facts) == ["run_failed"], "a run that said why it ended was not killed without a word"


def test_a_run_that_was_killed_has_the_date_of_its_last_metrics_if_it_has_any() -> None:
    for times, told in (
        ([], "it has no metrics"),
        ([1.0, 1764012345.0], "its last metrics are of 2025-11-24 "),
    ):
        facts = of({"trainer": {"steps": 4}}, time__step=[1.0] * len(times), time=times)
        facts.ended = ""
        (killed,) = [finding for finding in explained(facts) if finding.cause == "killed"]
        assert f"the run made {len(times)} of 4 steps; there is no checkpoint" in killed.evidence[2]
        assert told in killed.evidence[2]
    facts.warnings["disk"] = Messages(1, 3, 3, "4 MB are free")
    (full,) = [finding for finding in explained(facts) if finding.cause == "killed"]
    assert full.title == "The disk of the run is full."
    assert "OOM" not in f"{full}"
    facts.missing.append("events.jsonl")
    assert "killed" not in causes(facts), "nobody knows how it ended"


@pytest.mark.parametrize(
    ("saved", "lost"),
    [
        (40, "the newest checkpoint is of step 40: 15 steps are lost (15 minutes)"),
        (54, "the newest checkpoint is of step 54: 1 step is lost (60 s)"),
        (55, "the newest checkpoint is of step 55"),
        (0, "there is no checkpoint: 55 steps are lost (55 minutes)"),
    ],
)
@pytest.mark.parametrize(
    "error", ["", "ModelError: there is no such file", "OSError: No space left on device"]
)
def test_a_run_that_was_killed_or_failed_says_which_work_is_lost(saved: int, lost: str, error: str) -> None:
    facts = of({"trainer": {"steps": 300}}, time__step=[60.0] * 55)
    facts.saved, facts.ended = saved, "failed" if error else ""
    facts.error = Messages(1, 55, 55, error) if error else None
    (first, *_) = explained(facts)
    assert first.cause in ("killed", "run_failed", "known_error")
    assert f"the run made 55 of 300 steps; {lost}" in first.evidence[2]


def test_the_newest_checkpoint_is_what_the_events_say(tmp_path: Path) -> None:
    events = [
        {"event": "RunStarted", "step": 0, "config": {}},
        {"event": "Saving", "step": 7},
        {"event": "Saved", "step": 7},
        {"event": "Saving", "step": 9},
    ]
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "metrics.jsonl").write_text(
        "".join(f'{{"step": {i}, "time/step": 2.0}}\n' for i in range(1, 11))
    )

    def lost(*more: dict[str, object]) -> tuple[int, float]:
        lines = [json.dumps({"time": 1.0, **event}) for event in (*events, *more)]
        (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n")
        return Facts.read(Run(tmp_path, strict=False)).lost

    assert lost() == (3, 6.0)
    assert lost({"event": "Saved", "step": 9}) == (1, 2.0)
    assert lost({"event": "RunStarted", "step": 7, "resumed": True, "config": {}}) == (3, 6.0)


def test_a_loss_without_clip_fractions_has_no_cause_with_nan() -> None:
    config = {"trainer": {"updates_per_step": 8}}
    facts = of(config, time__step=[1.0] * 10, entropy=[1.0] * 10)
    assert not [line for finding in explained(facts) for line in finding.evidence if "nan" in line]


def test_an_error_comes_before_what_is_merely_slow() -> None:
    facts = of(time__step=[10.0] * 10)
    facts.stages.update({"publish": 40, "cut of the checkpoint": 30, "step": 30})
    facts.ended, facts.error = "failed", Messages(1, 9, 9, "WeightSyncError: engine 0 refused")
    assert causes(facts)[0] == "run_failed"
    facts.error = Messages(1, 9, 9, "OSError: [Errno 28] No space left on device")
    assert causes(facts)[0] == "known_error"
    assert "run_failed" not in causes(facts), "the disk explains the error"


def test_single_steps_of_a_long_run_are_not_a_cause() -> None:
    ones = [1.0] * 5000
    facts = of(time__step=ones, entropy=ones, logprob_diff_mean=[0.01] * 4999 + [1.2])
    facts.series["non_finite_rows"] = Series()
    for step in (17, 4001):
        facts.series["non_finite_rows"].add(step, 1.0)
    assert causes(facts) == []


@pytest.mark.parametrize("warning", ["rows", "rows/sums", "truncated/sums", "accuracy_finished/sums"])
def test_a_warning_of_single_steps_counts_if_it_is_said_until_the_end(warning: str) -> None:
    facts = of(time__step=[1.0] * 20)
    facts.warnings[warning] = Messages(9, 12, 20, "57 of 60 successes were cut off")
    (finding,) = explained(facts)
    assert (finding.cause, finding.evidence[0]) == ("warned", "57 of 60 successes were cut off")
    facts.warnings[warning] = Messages(9, 2, 10, "57 of 60 successes were cut off")
    assert causes(facts) == [], "the model has learnt to end since then"
    facts.warnings[warning] = Messages(1, 20, 20, "the last 5 steps trained nothing")
    assert causes(facts) == [], "a run that has just solved its task says this once"


def test_a_part_that_counts_mistakes_falls_in_a_healthy_run() -> None:
    up, down = [0.08 * n for n in range(12)], [0.46 - 0.04 * n for n in range(12)]
    healthy = of(
        groups__game=[8.0] * 12, time__step=[1.0] * 12, reward__game=up, accuracy__game=up,
        feedback_won__game=up, feedback_invalid_move__game=down,
    )  # fmt: skip
    assert causes(healthy) == []
    gamed = of(
        groups__game=[8.0] * 12, time__step=[1.0] * 12, reward__game=up,
        feedback_long__game=up, feedback_right__game=down,
    )  # fmt: skip
    assert causes(gamed) == ["reward_part_gamed"]
    weights = {"shaping": {"weights": {"long": 1.0, "right": 0.0}}}
    unpaid = evolve(gamed, config=weights)
    assert causes(unpaid) == [], "nobody pays for the part that falls"


def test_a_task_that_is_switched_off_on_purpose_is_not_dominated() -> None:
    tasks = {"sort": {"weight": 1.0}, "copy": {"weight": 0.0}}
    groups = {"groups__sort": [8.0] * 10, "groups__copy": [0.0] * 10}
    assert causes(of({"tasks": tasks}, time__step=[1.0] * 10, **groups)) == []
    tasks["copy"]["weight"] = 0.5
    assert causes(of({"tasks": tasks}, time__step=[1.0] * 10, **groups)) == ["one_task_dominates"]


def test_the_limit_of_each_engine_counts_as_often_as_there_are_engines() -> None:
    config = {"engine": {"max_requests": 8, "workers": 8}, "rollout": {"group_size": 8},
              "trainer": {"prompts_per_step": 8}}  # fmt: skip
    facts = of(config, time__step=[1.0] * 10)
    facts.stages.update({"wait for groups": 60, "step": 40})
    assert causes(facts) == []
    config["engine"]["workers"] = 1
    (finding,) = explained(facts)
    assert finding.cause == "too_few_in_flight"
    assert finding.fix.startswith("set engine.max_requests = 0")


def test_engines_that_die_are_not_late() -> None:
    facts = of(time__step=[1.0] * 10)
    for _ in range(2):
        add_message(facts.incidents, ("replaced", "engine 1"), 3, "it is replaced: engine local died 5 times")
    assert "engine_is_late" not in causes(facts)
    for _ in range(2):
        add_message(facts.incidents, ("replaced", "engine 1"), 3, "it is replaced: no answer within 60 s")
    assert "engine_is_late" in causes(facts)


def test_a_fix_that_was_applied_is_not_asked_for_again(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    warning = {"event": "WarningRaised", "cause": "no_stop", "step": 0, "message": "set rollout.stop"}
    starts = [{"event": "RunStarted", "step": step} for step in (0, 6)]
    ended = {"event": "RunEnded", "reason": "finished"}
    with (run / "events.jsonl").open("a") as file:
        file.writelines(json.dumps(event) + "\n" for event in (starts[0], warning, starts[1], ended))
    assert command.explain(run, as_json=False) == 0
    assert "continued at step 6" in capsys.readouterr().err
    assert named(run) == []


def test_a_task_of_short_answers_that_joins_is_not_a_collapse_of_the_policy() -> None:
    """The entropy is a mean over the tokens of all tasks: it falls although no task has changed."""
    collapsed = {"entropy": [1.0] * 5 + [0.1] * 5, "time/step": [1.0] * 10}
    assert "entropy_collapsed" in causes(of(**collapsed, groups__words=[8.0] * 10, reward__words=[0.3] * 10))
    facts = of(**collapsed, groups__words=[8.0] * 5 + [1.0] * 5, reward__words=[0.3] * 10)
    for step in range(6, 11):  # a task has no metrics in a step that does not train it
        facts.series.setdefault("groups/sums", Series()).add(step, 7.0)
    assert "entropy_collapsed" not in causes(facts)


def test_hints_that_are_quoted_and_a_collapse_under_hints_are_causes() -> None:
    steps = {"time/step": [1.0] * 10, "groups__words": [8.0] * 10, "reward__words": [0.3] * 10}
    healthy = {"entropy": [1.0] * 10, "completion_tokens__words": [20.0] * 10, "hints": [8.0] * 10}
    assert not {"hints_quoted", "hints_collapsed"} & {*causes(of(**steps, **healthy))}
    assert "hints_quoted" in causes(of(**steps, **healthy, hints_quoted=[1.0] * 10))
    shorter = healthy | {"completion_tokens__words": [20.0] * 5 + [4.0] * 5}
    assert "hints_collapsed" in causes(of(**steps, **shorter))
    assert "hints_collapsed" not in causes(of(**steps, **(shorter | {"hints": [0.0] * 10})))


def test_most_rewards_that_are_nan_are_named_whatever_was_said_last() -> None:
    facts = of(time__step=[1.0] * 10, **{"buffer/attempts": [100.0]})
    add_message(
        facts.incidents, ("unscored", "rollouts of task sort"), 1, "reward is nan; it must be finite", 90
    )
    add_message(facts.incidents, ("unscored", "rollouts of task sort"), 9, "ValueError: no answer", 3)
    (finding, *_) = explained(facts)
    assert finding.cause == "rollouts_unscored"
    assert "reward is nan" in finding.evidence[1]


def test_numbers_beyond_all_floats_and_odd_tables_do_no_harm(run: Path) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(f'{{"step": 1, "huge": {10**400}}}\n')
    (run / "config.toml").write_text(f"tasks = 3\nfilters = 4\n[trainer]\nlr = {10**400}\n")
    assert named(run) == []
