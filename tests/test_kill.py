"""Processes of a run are killed with SIGKILL; nothing is lost, nothing doubled, nothing left behind.

More moments, and random ones: ``python tests/benchmarks kill``.
"""

from __future__ import annotations

import json
from collections import Counter

import pytest
from killing import Run, check_accounting, left_after

from grpo_core.incidents import by_kind as told_by_kind
from grpo_core.reporting.report import Files

pytestmark = pytest.mark.slow


def test_a_run_whose_engine_and_environment_die_goes_on(tmp_path):
    run = Run(tmp_path)
    run.wait(lambda: run.steps >= 3)
    before = run.processes()
    for who in ("engine", "environment"):
        run.kill(who)
        run.wait(lambda who=who: run.processes().get(who, before[who]) != before[who])
        steps = run.steps
        run.wait(lambda steps=steps: run.steps > steps)
    said = run.end()
    assert run.process.returncode == 0, said
    check_accounting(run.directory)


class Sorting(Run):
    """A run of the shipped environment ``math:sort``."""

    def _start(self, *arguments: str) -> None:
        super()._start(*("math:sort" if each == "./words.py:Words" else each for each in arguments))


def test_a_run_says_what_it_has_survived_in_four_places(tmp_path):
    run = Sorting(tmp_path)
    for who in ("engine", "environment"):
        steps = run.steps
        run.wait(lambda steps=steps: run.steps >= steps + 3)
        before = run.processes()
        run.kill(who)
        run.wait(lambda who=who, before=before: run.processes().get(who, before[who]) != before[who])
    said = run.end()
    assert run.process.returncode == 0, said
    died = {
        "engine local": "its process is started again: engine local died (killed by SIGKILL)",
        "environment of task 'sort'": "died (killed by SIGKILL); it is started again",
    }
    lines = [line.partition(": ")[2] for line in said.splitlines() if line.startswith("survived, step ")]
    for component, told in died.items():
        assert sum(line.startswith(f"{component}: {told}") for line in lines) == 1, said

    events = [json.loads(line) for line in (run.directory / "events.jsonl").read_text().splitlines()]
    counted = Counter()
    for event in events:
        if event["event"] == "IncidentReported":
            counted[event["kind"], event["component"]] += event["count"]
    assert {component: counted["died", component] for component in died} == dict.fromkeys(died, 1)

    metrics = [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
    by_kind = Counter()
    for (kind, _), n in counted.items():
        by_kind[kind] += n
    for kind, n in by_kind.items():
        assert sum(row.get(f"incidents/{kind}", 0) for row in metrics) == n
    assert f"survived in this run: {told_by_kind(by_kind)} (the report has each)" in said
    incidents = Files.read(run.directory).incidents
    assert {key: each.count for key, each in incidents.items()} == counted


def test_a_run_whose_trainer_dies_says_so_in_seconds_and_how_to_go_on(tmp_path):
    run = Run(tmp_path)
    run.wait(lambda: run.steps >= 3)
    pids = run.kill("trainer")
    said = run.end(seconds=5)
    assert run.process.returncode == 1
    assert "trainer died (killed by SIGKILL)" in said
    assert "grpo-core train --resume" in said
    assert "Traceback" not in said
    assert not left_after(pids, 1)
    run.resume()
    assert "continuing run after step" in run.end()
    check_accounting(run.directory)


def test_a_run_that_is_killed_again_and_again_leaves_nothing_behind_and_loses_nothing(tmp_path):
    run = Run(tmp_path)
    for who, step in [("main", 2), ("all", 20), ("main", 40)]:
        run.wait(lambda step=step: run.steps >= step)
        pids = run.kill(who)
        run.end()
        assert len(pids) == 4
        assert not left_after(pids)
        assert not any(path.exists() for path in run.memory)
        run.resume()
    said = run.end()
    assert run.process.returncode == 0, said
    check_accounting(run.directory)
