"""The cost of a run over all of its processes: with each step, on its page, in lists, and as an end of it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import time

import pytest
from forks import GRPO, grpo

import grpo_plugin_report
from grpo_core import Run, RunInfo
from grpo_core.testing import check_config_sections
from grpo_plugin_devkit.trackers import check_tracker
from grpo_plugin_report import report
from grpo_plugin_report.cost import Account, CostTracker

SMALL = {"trainer.prompts_per_step": 2, "rollout.group_size": 2, "rollout.max_tokens": 8,
         "checkpoint.every": 1, "validation.every": 0, "model.options.warm_start_steps": 0,
         "model.options.width": 32}  # fmt: skip


def trained(cwd, *arguments):
    """Run the command to its end; return its status and what it said."""
    done = grpo(cwd, "train", *arguments)
    return done.returncode, done.stdout + done.stderr


def options(**settings):
    chosen = {name.replace("__", "."): value for name, value in settings.items()}
    return [word for key, value in chosen.items() for word in ("--set", f"{key}={value}")]


def listed(cwd):
    (found,) = json.loads(grpo(cwd, "runs", "list", "run", "--json").stdout)
    return found


def of(*rows):
    account = Account()
    for row in rows:
        account.add(row)
    return account


def started(at, **cost):
    return {"event": "RunStarted", "time": at, "config": {"cost": cost} if cost else {}}


def measured(at, version, **accuracy):
    results = {task: {"accuracy": each, "prompts": 0} for task, each in accuracy.items()}
    return {"event": "Validated", "time": at, "step": version, "version": version, "results": results}


def stepped(at, step, tokens=0.0):
    metrics = {"tokens_per_second/generation": tokens / 2, "time/generate": 2.0, "time/step": 3.0}
    return {"event": "StepEnded", "time": at, "step": step, "metrics": metrics}


def opened(at, step=-1):
    return {"event": "Opened", "time": at, "step": step}


def test_hours_of_gpus_and_tokens_are_added_up():
    rows = opened(0.0), started(1800.0, per_hour=2.0, gpus=4, per_million_tokens=10.0, currency="EUR")
    account = of(*rows, stepped(3600.0, 1, tokens=200_000), stepped(3600.0, 2, tokens=100_000))
    assert account.amount == pytest.approx(8.0 + 3.0)
    assert (account.total, account.rates) == ("11 EUR", "5.5 a step")


def test_a_measurement_pays_for_its_tokens_and_gives_the_price_of_a_point():
    first = measured(0.0, 0, sort=0.25, sum=0.5)
    last = measured(3600.0, 1, sort=0.5, sum=0.5)
    last["results"]["sort"] |= {"prompts": 50, "completion_tokens": 20.0}
    begin = started(0.0, per_hour=10.0, per_million_tokens=1000.0)
    begin["config"]["validation"] = {"options": {}, "sets": {"sort": {"options": {"n": 2}}}}
    account = of(opened(0.0), begin, first, stepped(3600.0, 1), last)
    assert account.amount == pytest.approx(10.0 + 2.0)
    assert account.per_point == {"sort": pytest.approx(12.0 / 25)}, "of sum nothing was gained"
    assert account.rates == "12 a step, 0.48 a point of sort"


def test_lost_work_is_paid_and_time_between_two_processes_is_not():
    hour = started(0.0, per_hour=1.0)
    lost = opened(0.0), hour, stepped(3600.0, 1), measured(3600.0, 1, sort=0.0), measured(3600.0, 2, sort=1.0)
    resumed = opened(90_000.0, 1), started(93_600.0, per_hour=3.0), stepped(97_200.0, 2)
    account = of(*lost, stepped(7200.0, 2), *resumed)
    assert account.amount == pytest.approx(2.0 + 6.0), "the second process at its own price"
    assert (account.steps, account.per_point) == (2, {}), "version 2 is not measured again yet"


STRANGE = (None, True, -1, 1e308, float("nan"), "x", [1], {"cost": 1, "validation": "x", "sort": 2},
           {"cost": {"per_hour": "x", "gpus": [], "currency": 3}, "validation": {"sets": 1, "options": []},
            "sort": {"accuracy": "x", "prompts": None}})  # fmt: skip


@pytest.mark.parametrize("value", STRANGE, ids=str)
def test_any_value_of_a_file_is_survived(value):
    for key in ("time", "step", "config", "metrics", "results", "version"):
        rows = opened(0.0), started(1.0, per_hour=1.0), stepped(2.0, 1), measured(3.0, 1, sort=0.5)
        account = of(*(row | {key: value} for row in rows))
        assert isinstance(account.total + account.rates, str)


def test_section_and_tracker_keep_their_contracts():
    check_config_sections(grpo_plugin_report)
    check_tracker(lambda run: CostTracker(run, per_hour=2.0, per_million_tokens=1.0))


@pytest.mark.long
@pytest.mark.parametrize(
    ("setting", "said"),
    [("per_hour=-1", "'per_hour' must be a finite number of at least 0: -1.0"),
     ("per_hour=nan", "cost.per_hour': expected a number, got nan"),
     ("per_million_tokens=inf", "'per_million_tokens' must be a finite number of at least 0: inf"),
     ("currency=3", "cost.currency': expected a string, got 3"),
     ("gpus=2", "cost.gpus = 2 does nothing")],
)  # fmt: skip
def test_wrong_prices_are_one_line_and_start_nothing(tmp_path, setting, said):
    status, told = trained(tmp_path, "--env", "math:sort", "--set", f"cost.{setting}", "--output", "x")
    assert (status, len(told.splitlines())) == (2, 1)
    assert said in told
    assert not (tmp_path / "x").exists()


@pytest.mark.slow
def test_a_run_stops_at_its_price_with_a_checkpoint_and_a_resumed_one_adds(tmp_path):
    """Tokens alone cost something here, so the amounts do not depend on the machine."""
    prices = options(cost__per_million_tokens=100_000, cost__currency="EUR")
    goal = options(trainer__steps=60, trainer__stop_when="cost >= 20")
    status, told = trained(
        tmp_path, "--env", "math:sort", *options(**SMALL), *prices, *goal, "--output", "run"
    )
    assert status == 0, told
    assert re.search(r"^cost: [\d.]+ EUR, [\d.]+ a step$", told, re.M), told
    assert "goal reached" in told
    rows = [row for row in Run(tmp_path / "run").metrics() if "cost" in row]
    assert rows[-1]["cost"] >= 20 > rows[-2]["cost"]
    assert rows[-1]["step"] in Run(tmp_path / "run").checkpoints
    first = listed(tmp_path)["cost"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert f"<b>{Account.of(Run(tmp_path / 'run')).total}</b>" in page
    more = options(trainer__stop_when="", trainer__steps=rows[-1]["step"] + 6)
    status, told = trained(tmp_path, "--resume", "run", *more)
    assert status == 0, told
    last = listed(tmp_path)["cost"]
    row = Run(tmp_path / "run").metrics()[-1]
    assert first["amount"] < row["cost"] <= last["amount"]
    assert last["per_step"] == pytest.approx(last["amount"] / row["step"])
    assert first["currency"] == "EUR"
    head, line = grpo(tmp_path, "runs", "list", "run").stdout.splitlines()
    assert "cost" in head
    assert str(Account.of(Run(tmp_path / "run"))) in line


@pytest.mark.slow
def test_the_time_of_a_killed_run_is_paid_as_well(tmp_path):
    dear = options(cost__per_hour=3600, trainer__steps=2000)
    command = [GRPO, "train", "--env", "math:sort", *options(**SMALL), *dear, "--output", "run"]
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    checkpoints = tmp_path / "run" / "checkpoints"
    try:
        while not list(checkpoints.glob("step-000003")):
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    before = listed(tmp_path)["cost"]["amount"]
    newest = max(Run(tmp_path / "run", strict=False).checkpoints)
    status, told = trained(tmp_path, "--resume", "run", *options(trainer__steps=newest + 2))
    assert status == 0, told
    after = listed(tmp_path)["cost"]["amount"]
    events = [*Run(tmp_path / "run").events()]
    starts = [index for index, row in enumerate(events) if row["event"] == "Opened"]
    seconds = [events[end - 1]["time"] - events[begin]["time"]
               for begin, end in zip(starts, [*starts[1:], len(events)], strict=True)]  # fmt: skip
    assert len(seconds) == 2
    assert before == pytest.approx(seconds[0], abs=0.5)
    assert after == pytest.approx(sum(seconds), abs=0.5)
    assert Run(tmp_path / "run").metrics()[-1]["cost"] == pytest.approx(after, abs=2.0), "the tracker agrees"


def test_the_tokens_of_a_measurement_have_a_price(tmp_path):
    prices = '[cost]\nper_million_tokens = 10.0\ncurrency = "USD"\n[validation.options]\nn = 4\n'
    (tmp_path / "config.toml").write_text(prices)
    (tmp_path / "results.json").write_text("{}")
    numbers = {"accuracy": 0.5, "prompts": 1000.0, "completion_tokens": 100.0}
    row = {"step": 0, "time": 1.0} | {f"validation/sort/{name}": value for name, value in numbers.items()}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    account = Account.of(Run(tmp_path))
    assert (account.total, account.rates) == ("4 USD", "")
    assert "<b>4 USD</b>" in report.render(report.Files.read(tmp_path))


def test_without_a_price_there_is_no_line(tmp_path):
    (tmp_path / "config.toml").write_text("[cost]\nper_hour = 0.0\n")
    events = [opened(0.0), started(1.0, per_hour=0.0, currency="EUR"), stepped(2.0, 1)]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(row) + "\n" for row in events))
    assert Account.of(Run(tmp_path)) is None
    told = {}
    tracker = CostTracker(RunInfo(name="r", directory=tmp_path, config={}, set_metrics=told.update))
    assert not told
    tracker.close()
