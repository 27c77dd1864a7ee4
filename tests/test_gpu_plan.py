"""The plans for a GPU: they fit eight minutes, and a check that fails, ends or hangs harms no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from killing import alive

BENCHMARKS = Path(__file__).parent / "benchmarks"

PROGRAM = """
import json, os, sys, time
sys.argv = ["gpu_plan.py", "first", "--device", "cpu", "--seconds", "60", "--output", sys.argv[1]]
import gpu_plan
from gpu_plan import Planned

def fails():
    raise ValueError("wrong")

gpu_plan.first = lambda device: [
    [Planned("right", 5, lambda: ("this", "this", True)), Planned("wrong", 5, fails)],
    [Planned("gone", 5, lambda: os._exit(3)), Planned("late", 0.2, lambda: time.sleep(90))],
    [Planned("long", 600, fails)],
    [Planned("last", 5, lambda: ("this", "that", False))],
]
sys.exit(gpu_plan.main())
"""


def started(path, program=PROGRAM):
    paths = [str(BENCHMARKS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", program, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_check_that_fails_ends_or_hangs_harms_no_other(tmp_path):
    path = tmp_path / "plan.json"
    process = started(path)
    said, _ = process.communicate()
    assert process.returncode == 1, said
    found = json.loads(path.read_text())
    seen = {result["check"]: (result["ok"], result["seen"]) for result in found["results"]}
    assert list(seen) == ["right", "wrong", "gone", "late", "last"]
    assert [ok for ok, _ in seen.values()] == [True, False, False, False, False]
    assert "ValueError: wrong" in seen["wrong"][1]
    assert seen["gone"][1] == "its process ended (3)"
    assert seen["late"][1].startswith("ended after 1 s")
    assert list(found["left_out"]) == ["long"]


@pytest.mark.slow
def test_a_plan_that_is_cut_has_written_what_it_saw_and_leaves_no_process(tmp_path):
    path = tmp_path / "plan.json"
    program = PROGRAM.replace('Planned("late", 0.2,', 'Planned("late", 50,')
    process = started(path, program)
    while not path.exists() or '"gone"' not in path.read_text():
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(1.0)  # "late" has begun
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.terminate()
    process.communicate()
    assert process.returncode == 1
    assert [each["check"] for each in json.loads(path.read_text())["results"]] == ["right", "wrong", "gone"]
    assert len(children) == 1
    assert not alive(children[0])


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="the plans are for Linux")
def test_the_plans_fit_eight_minutes(tmp_path):
    program = """
import sys, json, gpu_plan
for plan in (gpu_plan.first, gpu_plan.second, gpu_plan.third):
    groups = plan("cuda")
    names = [planned.name for group in groups for planned in group]
    seconds = sum(max(each.seconds for each in group) for group in groups if "Ray" not in group[0].name)
    print(json.dumps([len(names) - len(set(names)), seconds]))
"""
    process = started(tmp_path, program)
    said, _ = process.communicate()
    for line in said.splitlines():
        repeated, seconds = json.loads(line)
        assert repeated == 0
        assert seconds <= 480
    assert len(said.splitlines()) == 3
