"""The report of a run, with any contents of its files and any end."""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import recording
from hypothesis import given
from hypothesis import strategies as st
from logged import Logged
from tracked_run import a_run

from grpo_core import ConfigError, Group, Prompt, Rollout, RunInfo, Segment, Tokens
from grpo_core.cli import make_app
from grpo_core.config import Config, TaskConfig, TrackingConfig
from grpo_core.contracts.errors import Fault
from grpo_core.contracts.events import (
    ErrorRaised,
    GroupsReady,
    IncidentReported,
    PromptSkipped,
    RunEnded,
    RunStarted,
    StepEnded,
    Validated,
    WarningRaised,
)
from grpo_core.storage.run_directory import RunDirectory
from grpo_core.validation.strategies import Greedy
from grpo_plugin_algorithms.strategies import PassAtK
from grpo_plugin_report import charts, curves, report
from grpo_plugin_report.charts import Series, chart, label, shortened, smoothed, ticks
from grpo_plugin_report.curves import tasks_of
from grpo_plugin_report.report import Files

HOSTILE = '</script><script>alert(1)</script><img src=x onerror="alert(2)">{{ 7*7 }}&amp;\ud800\x00'


class Page(HTMLParser):
    """The tags and the text of a page."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def group(task, replies, *, prompt="52341="):
    """Rollouts of a prompt: replies and their rewards."""
    question = {"role": "user", "content": prompt}
    rollouts = tuple(
        Rollout(
            segments=[Segment(prompt_ids=(1,), tokens=Tokens.generated([2], [-0.5], [0]))],
            messages=(question, {"role": "assistant", "content": reply}),
            reward=reward,
            turns=1,
            finish_reason="stop",
        )
        for reply, reward in replies.items()
    )
    return Group(
        prompt=Prompt(messages=(question,), id=prompt, environment=task, answer="12345"),
        rollouts=rollouts,
        generation_version=0,
        target_version=1,
        slot=0,
    )


def metrics(step, *tasks):
    by_task = {
        name.format(task): value
        for task in tasks
        for name, value in {"reward/{}": step / 20, "accuracy/{}": step / 20, "groups/{}": 4.0,
                            "staleness/{}": 1.0, "completion_tokens/{}": 6.0, "truncated/{}": 0.0,
                            "filtered/{}": 4.0, "filtered_fraction/{}": 0.5,
                            "frac_reward_zero_std/{}": 0.0}.items()
    }  # fmt: skip
    return by_task | {
        "time/step": 2.0, "time/train": 1.0, "time/generate": 1.5, "tokens_per_second/generation": 1e6,
        "staleness_mean": 1.0, "staleness_max": 2.0, "mismatch_kl": math.nan if step == 2 else 0.01 * step,
        "logprob_diff_mean": 0.02, "buffer/ready": 3.0,
    }  # fmt: skip


def record(path, events, tasks=("sort",)):
    tracking = TrackingConfig(trackers=["files", "report"])
    config = Config(tasks={task: TaskConfig(env="math:sort") for task in tasks}, tracking=tracking)
    recording.record(path, events, config)
    return (path / report.REPORT).read_text(encoding="utf-8")


def run_of(*tasks, steps=4):
    yield RunStarted(directory="d", config={})
    yield Validated(step=0, version=0, results={task: {"accuracy": 0.125} for task in tasks})
    for step in range(steps):
        yield GroupsReady(step=step, groups=tuple(group(t, {"12345": 1.0, "54321": 0.0}) for t in tasks))
        yield StepEnded(step=step + 1, metrics=metrics(step + 1, *tasks))
    yield Validated(step=steps, version=steps, results={task: {"accuracy": 0.97} for task in tasks})
    yield RunEnded(step=steps, reason="finished")


# ---------------------------------------------------------------------------------- what is told


def test_a_finished_run_leaves_a_report_of_its_learning(tmp_path):
    page = Page(record(tmp_path / "a-run", run_of("sort")))
    for told in ("a-run", "finished", "sort: validation accuracy", "12.5% →", "97.0%",
                 "engines at work", "75%", "of the time; the trainer 50%", "max_staleness is 1", "52341=",
                 "54321", "[tasks.sort]"):  # fmt: skip
        assert told in page.text, told
    assert re.search(r"tokens generated\s*6M", page.text), "a million per second, 1.5 s of each of four steps"


@pytest.mark.long
@pytest.mark.parametrize("strategy", [Greedy(), PassAtK(k=[1, 2], n=2)], ids=lambda one: type(one).__name__)
def test_the_tasks_of_the_report_are_those_of_the_run(tmp_path, strategy):
    """Across the seam: real pipeline, strategy, trackers and report, with an environment that names parts."""
    run = a_run(tmp_path / "run", strategy)
    html = (run.path / report.REPORT).read_text(encoding="utf-8")
    begin = html.index("<h2>Tasks")
    table = html[begin : html.index("</table>", begin)]
    assert re.findall(r"<tr><td[^>]*>([^<]*)</td>", table) == ["task"]
    assert re.findall(r'class="dim">([^<]+): validation', html) == ["task"]


def test_each_task_has_its_curve_and_its_numbers(tmp_path):
    html = record(tmp_path / "run", run_of("easy", "hard"), ("easy", "hard", "never"))
    titles = [name for name in re.findall(r'aria-label="(\w+), by step"', html) if name in ("easy", "hard")]
    assert titles == ["easy", "hard"]
    rows = dict(re.findall(r"<tr><td>(\w+)</td>(.*?)</tr>", html))
    cells = {task: re.findall(r"<td[^>]*>([^<]*)</td>", row) for task, row in rows.items()}
    learnt = ["97.0%", "0.125", "12.5%", "50.0%", "0.0%", "6", "0.0%", "1", "16", "0"]
    assert cells == {"easy": learnt, "hard": learnt, "never": [*"--------", "0", "0"]}


def test_problems_are_reported_once_per_cause(tmp_path):
    events = [
        *(
            WarningRaised(step=step, cause="mismatch_kl", message=f"mismatch_kl is {step}")
            for step in (3, 4, 5)
        ),
        PromptSkipped(step=5, task="sort", prompt="seven", error="ValueError: bad row"),
        ErrorRaised(step=5, message="trainer: out of memory", fault=Fault("E", "m", "Traceback: here")),
        RunEnded(step=5, reason="failed"),
    ]
    text = Page(record(tmp_path / "run", [RunStarted(directory="d", config={}), *events])).text
    for told in ("3 times from step 3 to 5: mismatch_kl is 5", "1 prompt skipped",
                 "seven: ValueError: bad row", "trainer: out of memory", "Traceback: here",
                 "failed"):  # fmt: skip
        assert told in text, told


@pytest.mark.long
def test_incidents_are_a_row_for_each_kind_and_component(tmp_path):
    def incident(step, message, count=1, kind="retried", component="engine 0"):
        return IncidentReported(step=step, kind=kind, component=component, message=message, count=count)

    events = [
        incident(2, "first"),
        incident(2, "second", 40),
        incident(7, HOSTILE, 1, "died", "engine 1"),
        incident(9, "status 503: full", 2),
    ]
    html = record(tmp_path / "run", [*run_of("sort"), *events])
    table = html[html.index('<table class="incidents">') :]
    rows = re.findall(r"<tr>(<td.*?)</tr>", table[: table.index("</table>")], re.S)
    cells = [[Page(cell).text for cell in re.findall(r"<td.*?</td>", row, re.S)] for row in rows]
    assert cells[1] == ["retried", "engine 0", "43", "2 to 9", "status 503: full"]
    assert cells[0][:4] == ["died", "engine 1", "1", "7"]
    assert "<script>alert(1)" not in html
    assert 'class="incidents"' not in record(tmp_path / "calm", run_of("sort"))


@pytest.mark.long
def test_the_report_of_a_run_counts_what_its_metrics_count(tmp_path):
    """Across the seam: real pipeline, counts, trackers and report."""
    run = a_run(tmp_path / "run", Greedy())
    rows = map(json.loads, (run.path / "metrics.jsonl").read_text().splitlines())
    counted = sum(row.get("incidents/unscored", 0) for row in rows)
    ((key, incidents),) = Files.read(run.path).facts.incidents.items()
    assert key == ("unscored", "rollouts of task 'task'")
    assert incidents.count == counted > 1


def test_a_report_opens_without_a_network(tmp_path):
    page = Page(record(tmp_path / "run", run_of("sort")))
    assert not [attrs for _, attrs in page.tags if {"src", "href"} & set(attrs)]


# ---------------------------------------------------------------------------------- what is shown as it is


@pytest.mark.long
def test_hostile_text_stays_text(tmp_path):
    harmless = Page(record(tmp_path / "harmless", run_of("sort"))).tags
    events = [
        RunStarted(directory="d", config={}),
        Validated(step=0, version=0, results={HOSTILE[:-2]: {"accuracy": 0.5}}),
        GroupsReady(step=0, groups=(group(HOSTILE[:-2], {HOSTILE: 1.0, "no": 0.0}, prompt=HOSTILE),)),
        StepEnded(step=1, metrics=metrics(1, HOSTILE[:-2])),
        WarningRaised(step=1, cause=HOSTILE, message=HOSTILE),
        PromptSkipped(step=1, task=HOSTILE, prompt=HOSTILE, error=HOSTILE),
        ErrorRaised(step=1, message=HOSTILE, fault=Fault(HOSTILE, HOSTILE, HOSTILE, HOSTILE)),
    ]
    page = Page(record(tmp_path / "hostile", events))
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in harmless} | {
        "details",
        "summary",
        "ul",
        "li",
        "p",
    }
    assert "by grpo-core explain" in page.text, "which quotes the error"
    scripts = [attrs for tag, attrs in page.tags if tag == "script"]
    assert all(attrs == {"type": "application/json"} for attrs in scripts[:-1])
    assert scripts[-1] == {}
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert page.text.count("{{ 7*7 }}") > 5, "it is shown as it is"


def test_the_readings_of_a_chart_are_json_that_ends_no_script(tmp_path):
    events = [StepEnded(step=step, metrics=metrics(step, "</script>", "b")) for step in (1, 2)]
    html = record(tmp_path / "run", events)
    blocks = re.findall(r'<script type="application/json">(.*?)</script>', html)
    names = {name for block in blocks for name, _, _ in json.loads(block)["series"]}
    assert "</script>" in names


@pytest.mark.long
def test_intervals_and_reward_parts_are_drawn(tmp_path):
    html = (a_run(tmp_path / "run", Greedy()).path / report.REPORT).read_text()
    assert html.count('class="band"') == 1, "around the validation"
    page = Page(html)
    assert "task: parts" in page.text
    for name in ("exact", "exact, validation", "format/tags", "format/tags, validation"):
        assert name in page.text
    (learning,) = re.findall(r'(\{[^{}]*"validation accuracy"[^{}]*\})', html)
    assert re.search(r"\d+% \(\d+(\.\d)?% to \d+(\.\d)?%\)", learning), "the cursor reads the interval"


def test_a_validation_that_lacks_scores_has_a_band_and_no_point(tmp_path):
    """A missing score has a reason, so that a mean of the others would be of something else."""
    lacking = {"accuracy_low": 0.2, "accuracy_high": 0.75, "unscored": 0.55}
    whole = {"accuracy": 0.5, "accuracy_low": 0.4, "accuracy_high": 0.6}
    *begun, _, ended = run_of("sort")
    events = [
        *begun,
        *(
            Validated(
                step=step, version=step, results={"sort": results, "essay": {"errors": 3.0, "unscored": 0.3}}
            )
            for step, results in ((1, whole), (2, lacking), (3, whole), (4, lacking))
        ),
        ended,
    ]
    html = record(tmp_path / "run", events)
    text = Page(html).text
    assert "20.0% to 75.0% 55% unscored" in " ".join(text.split())
    assert "no score 30% unscored" in " ".join(text.split())
    assert "20% to 75%, no score" in html, "the cursor reads the interval"
    (task,) = (t for t in tasks_of([], [{"step": 0, "validation/a/accuracy": 0.5}, {"step": 4, **{
        f"validation/a/{name}": value for name, value in lacking.items()}}], {}))  # fmt: skip
    assert task.validation[0] == (0, 0.5)
    assert math.isnan(task.validation[1][1])
    assert task.intervals == [(4, 0.2, 0.75)]


def test_a_part_that_is_not_a_share_has_its_own_chart():
    steps = [{"step": i, "feedback_tries/a": 3.5, "feedback_exact/a": 0.5, "groups/a": 1.0} for i in (1, 2)]
    drawn = dict(curves.charts(tasks_of(steps, [], {}), steps, {}))["Learning"]
    assert [chart.title for chart in drawn] == ["a: parts", "a: tries"], "beside the rewards, if any"


def test_only_the_script_of_the_page_may_run(tmp_path):
    html = record(tmp_path / "run", run_of("sort"))
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.S)
    (policy,) = re.findall(r'Content-Security-Policy" content="([^"]*)"', html)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert "unsafe" not in policy.split("script-src")[1]


def test_text_that_controls_turns_or_hides_is_shown_as_what_it_is(tmp_path):
    said = "\x1b[2J\u202eevil\x9b\x00"
    events = [GroupsReady(step=0, groups=(group("sort", {said: 1.0, "b": 0.0}, prompt=said),))]
    events += [StepEnded(step=1, metrics=metrics(1, "sort"))]
    events += [PromptSkipped(task="sort", prompt=said, error=said), ErrorRaised(message=said)]
    html = record(tmp_path / "run", events)
    assert html.count("␛[2J⟨202E⟩evil⟨009B⟩␀") >= 4
    assert not set(html) & set("\x00\x1b\x9b\u202e")


# ---------------------------------------------------------------------------------- incomplete runs


def test_a_run_without_a_step_has_a_report(tmp_path):
    text = Page(record(tmp_path / "run", [])).text
    assert "No step has been trained and nothing was measured yet." in text
    assert "killed" in text


def test_a_running_run_says_how_far_it_is(tmp_path):
    run = tmp_path / "run"
    record(run, [event for event in run_of("sort") if not isinstance(event, RunEnded)])
    directory, _ = RunDirectory.open(run)
    directory.lock()
    try:
        page = Page(report.write(run).read_text()).text
        assert re.search(r"running\s+step 4, last step \d+ s ago, about .* left", page)
    finally:
        directory.unlock()
    text = Page(report.write(run).read_text()).text
    assert f"killed grpo-core train --resume {run} continues it" in " ".join(text.split())


def test_a_resumed_run_takes_away_the_page_of_its_steps_before(tmp_path):
    run = tmp_path / "run"
    record(run, run_of("sort"))
    assert (run / report.REPORT).exists()
    report.ReportTracker(RunInfo(name="run", directory=run, config={}, resumed_from=4))
    assert not (run / report.REPORT).exists()


def test_a_killed_run_has_a_report_of_its_steps(tmp_path):
    run = tmp_path / "run"
    record(run, [event for event in run_of("sort") if not isinstance(event, RunEnded)])
    for name in ("metrics.jsonl", "events.jsonl", "rollouts/step-000004.jsonl.gz"):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(whole[: len(whole) - 20])
    (run / report.REPORT).unlink()
    files = Files.read(run)
    assert [row["step"] for row in files.steps] == [1, 2, 3, 4]
    assert [row["step"] for row in files.validations] == [0], "half of a line is none"
    text = Page(report.write(run).read_text()).text
    assert "killed" in text
    assert "could not be read: a process was killed while it wrote" in text


def test_other_files_do_not_break_the_report(tmp_path):
    (tmp_path / "config.toml").write_text("half = [")
    (tmp_path / "metrics.jsonl").write_bytes(b'[1]\nnull\n{"step": "x", "time/step": {}}\n\xff\xfe{}\n')
    (tmp_path / "events.jsonl").write_text('{"event": "RunEnded"}\n{"event": "WarningRaised"}\n')
    (tmp_path / "rollouts").mkdir()
    (tmp_path / "rollouts" / "step-000001.jsonl").write_text('{"messages": [3, {"role": "assistant"}]}\n7\n')
    (tmp_path / "rollouts" / "step-new.jsonl").write_text("{}")
    assert "5 lines could not be read" in report.render(Files.read(tmp_path))


def test_a_report_that_cannot_be_made_does_not_end_a_run(tmp_path, monkeypatch):
    def fail(path):
        raise OSError("no space left on device")

    monkeypatch.setattr(report, "write", fail)
    with Logged() as log:
        assert recording.record(
            tmp_path / "run", [], Config(tracking=TrackingConfig(trackers=["files", "report"]))
        )
    assert "no report could be written: no space left on device" in log.text
    assert "Traceback" not in log.text, "the disk is full, and the log is on it"


def test_a_full_disk_leaves_no_part_of_a_report(tmp_path, monkeypatch):
    path = tmp_path / "run"
    record(path, run_of("sort"))
    (path / report.REPORT).unlink()

    def fill(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", fill)
    with pytest.raises(ConfigError, match=r"report\.html: the report cannot be written \(No space"):
        report.write(path)
    assert not [each.name for each in path.iterdir() if report.REPORT in each.name]


def test_the_command_makes_it_at_any_time(tmp_path, capsys):
    record(tmp_path / "run", run_of("sort"))
    (tmp_path / "run" / report.REPORT).unlink()
    assert make_app()(["report", str(tmp_path / "run")], result_action="return_value") == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "run" / report.REPORT)
    assert (tmp_path / "run" / report.REPORT).is_file()
    with pytest.raises(ConfigError, match="is not a run"):
        make_app()(["report", str(tmp_path)], result_action="return_value")


def test_a_task_of_any_name_is_found_in_the_metrics():
    rows = [{"step": 1, "groups/a/b": 2.0, "reward/a/b": 0.5, "feedback_exact/a/b": 1.0}]
    (task,) = tasks_of(rows, [{"step": 0, "validation/a/b/pass@4": 0.25}], {})
    assert (task.name, task.metric, task.groups) == ("a/b", "pass@4", 2)
    assert (task.rewards, task.validation) == ([(1, 0.5)], [(0, 0.25)])


def test_a_step_with_few_groups_of_a_task_counts_for_few_in_its_mean():
    rows = [{"step": 1, "groups/a": 1.0, "reward/a": 0.0}, {"step": 2, "groups/a": 31.0, "reward/a": 1.0}]
    (task,) = tasks_of(rows, [], {})
    assert task.numbers["reward"] == 31 / 32


# ---------------------------------------------------------------------------------- charts

NUMBERS = st.floats(-charts.LARGEST, charts.LARGEST)


@given(NUMBERS, NUMBERS, st.integers(2, 8))
def test_ticks_are_few_and_enclose_the_data(one, other, about):
    low, high = sorted((one, other))
    found = ticks(low, high, about)
    assert 2 <= len(found) <= about + 3
    assert found == sorted(set(found))
    span = max(abs(low), abs(high), found[-1] - found[0])
    assert found[0] <= low + 1e-6 * span
    assert found[-1] >= high - 1e-6 * span


@given(st.lists(st.floats(), max_size=40))
def test_every_point_is_inside_the_view(values):
    drawn = chart("c", [Series(name="s", points=list(enumerate(values)))])
    finite = [value for value in values if abs(value) <= charts.LARGEST]
    assert (drawn is None) == (not finite)
    if drawn is not None:
        places = [tuple(map(float, place.split())) for place in re.split("[ML]", drawn.lines[0])[1:]]
        assert len(places) == len(finite)
        assert all(charts.LEFT <= x <= charts.WIDTH - charts.RIGHT for x, _ in places)
        assert all(charts.TOP <= y <= charts.HEIGHT - charts.BOTTOM for _, y in places)


def test_the_only_point_of_a_line_is_marked():
    """A path of one point draws nothing, so that the charts of a run with one step were empty."""
    drawn = chart("c", [Series(name="s", points=[(1, 0.5), (2, math.nan)])])
    assert drawn is not None
    assert len(drawn.marks[0]) == 1


def test_a_line_has_a_gap_where_nothing_was_measured():
    drawn = chart("c", [Series(name="s", points=[(0, 1), (1, 2), (2, math.nan), (3, 1)])])
    assert drawn is not None
    assert re.sub(r"[\d. ]", "", drawn.lines[0]) == "MLM"


def test_a_long_line_is_drawn_through_means_of_neighbours():
    series = Series(name="s", points=[(x, float(x % 2)) for x in range(1001)])
    points = shortened(series, most=100).points
    assert len(points) == 91
    assert points[0] == (5, pytest.approx(5 / 11))


def test_smoothing_keeps_a_straight_line_and_bridges_gaps():
    line = [(x, 2.0 * x) for x in range(9)]
    assert smoothed(line, 2)[2:-2] == line[2:-2]
    assert smoothed([(0, 1.0), (1, math.nan), (2, 3.0)], 1)[1] == (1, 2.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0"), (0.25, "0.25"), (1500, "1,500"), (20_000, "20k"), (1.5e6, "1.5M"), (4e-4, "4e-4")],
)
def test_labels_are_short(value, text):
    assert label(value) == text
