"""Processes of a run are killed, stopped or starved; nothing is lost, nothing doubled, nothing left behind.

More: ``python tests/benchmarks kill`` (random moments) and ``crash`` (each process, fault and moment).
"""

from __future__ import annotations

import gzip
import json
import shutil
from collections import Counter

import pytest
from crashing import check, crash, make_model
from killing import WORDS, Run, check_accounting, left_after

from grpo_core.contracts.incidents import by_kind as told_by_kind
from grpo_plugin_report.report import Files

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def survivor(tmp_path_factory):
    """A finished run whose engine and environment were killed, and what it said; tests only read it."""
    run = Run(tmp_path_factory.mktemp("survivor"))
    for who in ("engine", "environment"):
        steps = run.steps
        run.wait(lambda steps=steps: run.steps >= steps + 3)
        before = run.processes()
        run.kill(who)
        run.wait(lambda who=who, before=before: run.processes().get(who, before[who]) != before[who])
        steps = run.steps
        run.wait(lambda steps=steps: run.steps > steps)
    return run, run.end()


@pytest.mark.nightly
def test_a_run_whose_engine_and_environment_die_continues(survivor):
    run, said = survivor
    assert run.process.returncode == 0, said
    check_accounting(run.directory)


def test_a_run_says_what_it_has_survived_in_four_places(survivor):
    run, said = survivor
    assert run.process.returncode == 0, said
    died = {
        "engine local": ["restarting its process: engine local died (killed by SIGKILL)"],
        "environment of task 'words'": [
            "died (killed by SIGKILL); it is started again",
            "it died while nobody waited for it; it is started again",
        ],
    }
    lines = [line.partition(": ")[2] for line in said.splitlines() if line.startswith("survived, step ")]
    for component, told in died.items():
        starts = tuple(f"{component}: {each}" for each in told)
        assert sum(line.startswith(starts) for line in lines) == 1, said

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
    assert f"recovered in this run from {told_by_kind(by_kind)} (events.jsonl has each)" in said
    incidents = Files.read(run.directory).facts.incidents
    assert {key: each.count for key, each in incidents.items()} == counted


def test_a_run_whose_trainer_dies_says_so_in_seconds_and_how_to_continue(tmp_path):
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


WITH_A_SANDBOX = (
    WORDS.format(seconds=0.0)
    + """
    def __init__(self):
        import subprocess
        subprocess.run(["sh", "-c", "setsid sleep 1234 >/dev/null 2>&1 &"], check=True)
"""
)


@pytest.mark.parametrize(
    "kills",
    [
        [("main", 2), ("all", 20)],
        pytest.param([("main", 2), ("all", 20), ("main", 40)], marks=pytest.mark.nightly),
    ],
)
def test_a_run_that_is_killed_again_and_again_leaves_nothing_behind_and_loses_nothing(tmp_path, kills):
    run = Run(tmp_path, environment=WITH_A_SANDBOX)
    for who, step in kills:
        run.wait(lambda step=step: run.steps >= step)
        started = run.everything()
        pids = run.kill(who)
        run.end()
        assert len(pids) == 4
        assert len(started) > len(pids), "the sandbox and what watches over it"
        assert not left_after(started)
        assert not any(path.exists() for path in run.memory)
        assert not [path for path in run.temporary.rglob("*") if not path.is_dir()]
        run.resume()
    said = run.end()
    assert run.process.returncode == 0, said
    check_accounting(run.directory)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("process", "fault", "moment"),
    [
        ("main", "SIGSTOP", "weight sync"),
        ("trainer", "SIGSEGV", "checkpoint"),
        ("engine", "limit", "validation"),
        ("environment", "SIGSTOP", "training"),
    ],
)
def test_a_fault_costs_a_run_nothing_that_it_has_trained(tmp_path, model, process, fault, moment):
    found = crash(tmp_path, model, process, fault, moment)
    assert found.problems == []
    _the_checker_finds_what_is_altered(tmp_path / "run")


def _the_checker_finds_what_is_altered(run):
    """Each of some changes of the run's files is a problem to the checker."""
    for alter in (_twice, _older, _lost, _longer, _other_reward, _damaged):
        copy = run.with_name("altered")
        shutil.copytree(run, copy)
        alter(copy)
        assert list(check(copy)), alter.__name__
        shutil.rmtree(copy)


def _rewrite(path, change):
    """Change the last event that ``change`` knows."""
    lines = path.read_text().splitlines()
    for i, line in reversed(list(enumerate(lines))):
        event = json.loads(line) if line.endswith("}") else {}
        if change(event):
            lines[i] = json.dumps(event)
            break
    path.write_text("\n".join(lines) + "\n")


def _ready(change):
    def changed(event):
        if event.get("event") == "GroupsReady":
            change(event["groups"])
            return True
        return False

    return lambda run: _rewrite(run / "events.jsonl", changed)


def _twice(run):
    _ready(lambda groups: groups.__setitem__(0, groups[1]))(run)


def _older(run):
    _ready(lambda groups: groups[0].update(token_versions=[1, 1], generation_version=1))(run)


def _lost(run):
    _ready(lambda groups: groups.pop())(run)


def _longer(run):
    path = run / "metrics.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[-2] + "\n")


def _other_reward(run):
    path = run / "rollouts" / "step-000007.jsonl.gz"
    first, *others = gzip.decompress(path.read_bytes()).decode().splitlines()
    changed = json.loads(first)
    changed["reward"] = 1.0 - changed["reward"]
    path.write_bytes(gzip.compress("\n".join([json.dumps(changed), *others, ""]).encode()))


def _damaged(run):
    path = run / "checkpoints" / "step-000030" / "optimizer" / "state.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
