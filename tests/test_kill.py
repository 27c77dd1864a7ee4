"""Processes of a run are killed with SIGKILL; nothing is lost, nothing doubled, nothing left behind.

More moments, and random ones: ``python tests/benchmarks kill``.
"""

from __future__ import annotations

import pytest
from killing import Run, check_accounting, left_after

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
