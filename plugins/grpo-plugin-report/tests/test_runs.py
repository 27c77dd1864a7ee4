"""``grpo-core runs`` lists, compares, prunes and exports runs correctly."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from pathlib import Path

import pytest
from forks import grpo

from grpo_core import ConfigError, Run
from grpo_core.config import build
from grpo_core.storage.run_directory import RunDirectory, planned_steps
from grpo_plugin_report import runs
from grpo_plugin_report.explain.decisions import explained
from grpo_plugin_report.explain.facts import Facts

METRICS = [
    {"step": 0, "time": 1.0, "validation/sort/accuracy": 0.25, "validation/sort/reward": 0.3},
    {"step": 1, "time": 2.0, "reward/sort": 0.5, "time/step": 2.0},
    {"step": 2, "time": 4.0, "reward/sort": 0.75, "time/step": 3.0},
    {"step": 2, "time": 5.0, "validation/sort/accuracy": 0.5, "validation/sort/reward": 0.6},
]


@pytest.fixture
def made(tmp_path):
    """Returns a function that makes the directory of a run as it is after two steps."""

    def make(name, *, reason="finished", best="", keep_every=0, **trainer):
        config = build(
            [
                {
                    "tasks": {"sort": {"env": "math:sort"}},
                    "trainer": {"steps": 4, **trainer},
                    "checkpoint": {"best": best, "keep_every": keep_every},
                }
            ]
        )
        run = RunDirectory.create(tmp_path / name, config)
        lines = "".join(json.dumps(row) + "\n" for row in METRICS)
        (run.path / "metrics.jsonl").write_text(lines + '{"step": 3, "ti')
        ends = [{"time": 6.0, "event": "RunEnded", "step": 2, "reason": reason}] if reason else []
        events = [{"time": 0.5, "event": "Opened", "step": -1}, {"time": 1.0, "event": "RunStarted"}, *ends]
        (run.path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        for step in (1, 2, 3, 4):
            checkpoint = run.checkpoints / f"step-{step:06d}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "weights").write_bytes(bytes(1000 * step))
        run.unlock()
        return run

    return make


def test_a_line_says_how_a_run_ended_and_what_it_learnt(made, capsys):
    run = made("sorting")
    assert runs.list_([run.path]) == 0
    heads, line = capsys.readouterr().out.splitlines()
    assert heads.split() == ["run", "state", "tasks", "steps", "learnt", "started", "size"]
    assert line.startswith(f"{run.path}  finished  sort   2 of 4  sort accuracy 25.0% -> 50.0%")
    assert line.endswith(" kB")


@pytest.mark.parametrize("reason", ["finished", "interrupted", "failed", ""])
def test_a_run_that_did_not_say_how_it_ended_was_killed(made, reason):
    assert runs.summary(made("r", reason=reason).path).state == (reason or "killed")


def test_a_run_in_progress_is_running_and_is_not_pruned(made):
    run = made("r", reason="")
    run.lock()
    before = (run.path / ".lock").read_bytes()
    assert runs.summary(run.path).state == "running"
    assert (run.path / ".lock").read_bytes() == before
    with pytest.raises(ConfigError, match="is running in it"):
        runs.prune([run.path], keep=1, yes=True)
    run.unlock()
    assert runs.summary(run.path).state == "killed"


def test_running_runs_of_a_directory_are_left_out_and_all_others_are_pruned(made, tmp_path, capsys):
    first, goes_on, last = (made(name) for name in ("a", "b", "c"))
    goes_on.lock()
    assert runs.prune([tmp_path], keep=1, yes=True) == 0
    printed = capsys.readouterr()
    assert [len(list(run.checkpoints.glob("step-*"))) for run in (first, goes_on, last)] == [1, 4, 1]
    assert printed.out.splitlines()[-1] == "freed 12.0 kB"
    assert printed.err.startswith(f"left out: {goes_on.path}: process ")


def test_nothing_is_pruned_if_a_named_run_is_running(made):
    first, goes_on = made("a"), made("b")
    goes_on.lock()
    with pytest.raises(ConfigError, match="is running in it"):
        runs.prune([first.path, goes_on.path], keep=1, yes=True)
    assert len(list(first.checkpoints.glob("step-*"))) == 4
    first.lock()


@pytest.mark.parametrize(("file", "text"), [("config.toml", "steps = ["), ("metrics.jsonl", "nonsense\n")])
def test_a_run_that_cannot_be_read_hides_no_other(made, tmp_path, capsys, file, text):
    made("one")
    (made("two").path / file).write_text(text)
    assert runs.list_([tmp_path]) == 0
    printed = capsys.readouterr()
    lines = {line.split()[0]: line.split()[1] for line in printed.out.splitlines()[1:]}
    assert lines == {f"{tmp_path}/one": "finished", f"{tmp_path}/two": "unreadable"}
    assert f"note: {tmp_path}/two/{file}" in printed.err


def test_the_runs_of_a_directory_are_listed_as_json(made, tmp_path, capsys):
    made("one")
    made("two", reason="failed")
    runs.list_([tmp_path], as_json=True)
    one, two = json.loads(capsys.readouterr().out)
    assert (Path(one["run"]).name, Path(two["run"]).name) == ("one", "two")
    assert (one["state"], two["state"]) == ("finished", "failed")
    assert one["scores"] == {"sort": {"metric": "accuracy", "first": 0.25, "last": 0.5}}
    assert (one["step"], one["steps"], one["seconds_per_step"]) == (2, 4, 2.5)


def test_a_comparison_shows_the_settings_that_differ_and_only_those(made, capsys):
    one, two = made("one", lr=1e-4), made("two", lr=2e-4, reason="failed")
    runs.compare([one.path, two.path])
    rows = {line.split("  ")[0]: line.split()[-2:] for line in capsys.readouterr().out.splitlines()[1:]}
    assert list(rows) == ["trainer.lr", "state", "steps", "seconds a step", "validation sort"]
    assert rows["trainer.lr"] == ["0.0001", "0.0002"]
    assert rows["state"] == ["finished", "failed"]
    with pytest.raises(ConfigError, match="two or more"):
        runs.compare([one.path])


def test_the_newest_and_the_best_checkpoint_stay_and_nothing_goes_without_yes(made, capsys):
    run = made("r", best="validation/sort/accuracy")
    scores = {"metric": "validation/sort/accuracy", "scores": {"0": 0.2, "2": 0.5, "4": 0.4}}
    (run.checkpoints / "scores.json").write_text(json.dumps(scores))
    runs.prune([run.path], keep=1, yes=False)
    assert "would free 4.0 kB; --yes removes them" in capsys.readouterr().out
    assert len(list(run.checkpoints.glob("step-*"))) == 4
    runs.prune([run.path], keep=1, yes=True)
    assert sorted(p.name for p in run.checkpoints.glob("step-*")) == ["step-000002", "step-000004"]
    with pytest.raises(ConfigError, match="--keep is 0"):
        runs.prune([run.path], keep=0, yes=True)


def test_checkpoints_that_stay_for_ever_are_not_pruned(made):
    run = made("r", keep_every=2)
    runs.prune([run.path], keep=1, yes=True)
    assert sorted(p.name for p in run.checkpoints.glob("step-*")) == ["step-000002", "step-000004"]


def test_without_metrics_no_empty_table_is_written(made):
    run = made("r")
    for empty in (lambda path: path.write_text(""), lambda path: path.unlink()):
        empty(run.path / "metrics.jsonl")
        with pytest.raises(ConfigError, match="has no metrics, so there is nothing to export"):
            runs.export(run.path)


def test_a_directory_without_runs_is_not_pruned(tmp_path):
    with pytest.raises(ConfigError, match=f"there are no runs in {tmp_path}"):
        runs.prune([tmp_path], keep=1, yes=True)


def test_metrics_are_exported_with_a_column_for_each(made, tmp_path, capsys):
    run, output = made("r"), tmp_path / "metrics.csv"
    runs.export(run.path, output=output)
    rows = list(csv.DictReader(io.StringIO(output.read_text())))
    assert [row["step"] for row in rows] == ["0", "1", "2", "2"]
    assert [row["reward/sort"] for row in rows] == ["", "0.5", "0.75", ""]
    assert capsys.readouterr().out == f"{output} has 4 rows of 6 columns\n"
    runs.export(run.path)
    assert capsys.readouterr().out.splitlines() == output.read_text().splitlines()
    with pytest.raises(ConfigError, match="exists; give another name"):
        runs.export(run.path, output=output)
    with pytest.raises(ConfigError, match=r"^--output .*nowhere.*: cannot be written: No such file or dir"):
        runs.export(run.path, output=tmp_path / "nowhere" / "metrics.csv")


def test_an_export_does_not_flood_a_terminal(made, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = made("r")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    runs.export(run.path)
    assert capsys.readouterr().out.startswith("r.csv has 4 rows of ")
    assert len(list(csv.DictReader(io.StringIO(Path("r.csv").read_text())))) == 4


def test_a_directory_without_a_run_is_named(tmp_path, made, capsys):
    with pytest.raises(ConfigError, match="nowhere is neither a run nor a directory of runs"):
        runs.list_([tmp_path / "nowhere"])
    assert runs.list_([tmp_path]) == 0
    assert "there are no runs" in capsys.readouterr().out
    run = made("r")
    (run.path / "metrics.jsonl").write_text("nonsense\n")
    with pytest.raises(ConfigError, match=r"line 1: .* not a line of metrics"):
        runs.list_([run.path])


@pytest.mark.slow
def test_a_run_that_was_trained_is_listed_pruned_and_still_verified(tmp_path):
    def command(*arguments):
        ended = grpo(tmp_path, *arguments, timeout=200)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    small = {"trainer.steps": 3, "trainer.prompts_per_step": 2, "rollout.group_size": 2}
    small |= {"checkpoint.every": 1, "validation.every": 0, "model.options.warm_start_steps": 2}
    sets = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    command("train", "--env", "math:sort", *sets, "--output", "runs/small")
    assert "runs/small  finished  sort   3 of 3" in command("runs")
    assert "removed runs/small/checkpoints/step-000002" in command("runs", "prune", "runs/small", "--yes")
    assert "laws hold over 3 steps" in command("verify", "runs/small")
    assert command("runs", "export", "runs/small").count("\n") == 4


@pytest.mark.nightly
def test_everything_shows_a_run_of_epochs_with_its_number_of_steps(tmp_path):
    """Six prompts are two steps of three; trainer.steps, whose default is another number, plays no part."""
    (tmp_path / "letters.py").write_text(
        "import grpo_core as grpo\n"
        "class Letters(grpo.Environment):\n"
        "    def prompts(self, split):\n"
        "        return [grpo.Prompt(messages=f't{i}=') for i in range(6)]\n"
        "    def evaluate(self, episodes):\n"
        "        return [float(len(e.reply) % 2) for e in episodes]\n"
    )

    def command(*arguments):
        ended = grpo(tmp_path, *arguments, timeout=200)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    small = {"trainer.epochs": 1, "trainer.prompts_per_step": 3, "rollout.group_size": 2}
    small |= {"rollout.max_tokens": 8, "validation.every": 0}
    small |= {"model.options.warm_start_steps": 0, "model.options.width": 32}
    sets = [word for key, value in small.items() for word in ("--set", f"{key}={value}")]
    told = command("train", "--env", "./letters.py:Letters", *sets, "--output", "run")
    assert re.findall(r"step \d+/\d+", told) == ["step 1/2", "step 2/2"]
    assert "2 of 2" in (tmp_path / "run" / "report.html").read_text()
    command("export", "run", "--output", "out")
    assert "step 2 of 2\n" in (tmp_path / "out" / "README.md").read_text()
    facts = Facts.read(Run(tmp_path / "run", strict=False))
    facts.ended = ""
    (killed,) = [finding for finding in explained(facts) if finding.cause == "killed"]
    assert re.search(
        r"made 2 of 2 steps; .* its last metrics are of 20\d\d-\d\d-\d\d ", " ".join(killed.evidence)
    )


@pytest.mark.parametrize(
    ("written", "started", "steps"),
    [
        ({"trainer": {"steps": 9}}, None, 9),
        ({"trainer": {"steps": 9, "epochs": 1.0}}, None, 0),
        ({"trainer": {"steps": 9, "epochs": 1.0}}, {"trainer": {"steps": 4, "epochs": 1.0}}, 4),
        ({"trainer": {"steps": 9}}, {"trainer": {"steps": "many"}}, 9),
        (3, [4], 0),
    ],
)
def test_the_last_start_knows_the_number_of_steps_and_a_file_with_epochs_does_not(written, started, steps):
    assert planned_steps(written, started) == steps
