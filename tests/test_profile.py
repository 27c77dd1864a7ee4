"""``train --profile N`` traces the trainer, and prints where the time of each process went."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path

import attrs
import pytest
from test_cli import grpo
from test_trainer import batch, ragged, same, setup

from grpo_core.app import preflight, profile
from grpo_core.config import build
from grpo_core.demo import tiny
from grpo_core.errors import ConfigError
from grpo_core.events import StepEnded
from grpo_core.plugins.host import PluginHost
from grpo_core.training.trainer import TorchTrainer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "m"
    tiny.make_tiny_model(directory, (), width=16, layers=1, warm_start_steps=0)
    return str(directory)


@pytest.mark.long
def test_the_trainer_traces_the_steps_after_the_first_two_and_computes_the_same(
    model: str, tmp_path: Path
) -> None:
    plain = TorchTrainer(setup(model))
    traced = TorchTrainer(attrs.evolve(setup(model, profile=2), profile=str(tmp_path / "profile")))
    for step in range(7):
        plain.step(batch(ragged(seed=step), step))
    for step in range(7):
        traced.step(batch(ragged(seed=step), step))
        traced.publish()
        assert (tmp_path / "profile" / "trainer.json").exists() is (step >= 5)
    assert same(plain, traced)
    told = json.loads((tmp_path / "profile" / "trainer.json").read_text())
    assert told["steps"] == 2
    assert told["parts"].keys() >= {"forward", "backward", "optimizer", "publication"}
    assert 0 < sum(told["parts"].values()) < told["seconds"]
    assert told["operations"][0]["calls"] > 0
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "trainer.trace.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("grpo_core: optimizer") == 2


def run(directory: Path, steps: int, *, profiled: int) -> str:
    """Tell a tracker of steps of one second, in which the processes compute more each time."""
    seconds = iter([{"main": 1.0, "trainer": 5.0}, {"main": 1.5, "trainer": 8.0, "engine local": 2.0}])

    def cpu() -> Mapping[str, float]:
        return next(seconds)

    tracker = profile.ProfileTracker(directory, profiled, cpu)
    metrics = {"time/step": 1.0, "time/wait_for_groups": 0.25, "time/generate": 0.5, "time/train": 0.75}
    for step in range(1, steps + 1):
        tracker.event(StepEnded(step=step, metrics=metrics))
    return profile.told(directory, profiled)


def test_the_table_has_what_each_process_did_in_the_steps_of_the_profile(tmp_path: Path) -> None:
    text = run(tmp_path, 10, profiled=4)
    assert "Where the time of 4 steps went: 4.00 s, 1.000 s a step" in text
    assert re.search(r"^main +0\.50 +waited 1\.00 s \(25%\) for groups to train$", text, re.MULTILINE)
    assert re.search(r"^trainer +3\.00 +trained 3\.00 s \(75%\)$", text, re.MULTILINE)
    assert re.search(r"^engine local +2\.00 +generated 2\.00 s \(50%\)", text, re.MULTILINE)
    assert f"The traces are in {tmp_path}" in text


def test_a_run_that_ends_before_its_profile_says_so(tmp_path: Path) -> None:
    assert "there is no profile: it needs 10 steps" in run(tmp_path, 9, profiled=4)


def test_a_profile_that_is_longer_than_the_run_is_refused_before_it_starts() -> None:
    trainer = {"steps": 9, "profile": 4}
    config = build([{"tasks": {"sort": {"env": "math:sort"}}, "trainer": trainer}])
    with pytest.raises(ConfigError, match=r"needs 10 steps, and the run has 9: raise trainer\.steps"):
        preflight.check(config, PluginHost.discover())


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_this_process_has_computed_as_long_as_the_system_says() -> None:
    before = sum(os.times()[:2])
    found = profile.cpu_seconds()["main"]
    assert before - 0.1 <= found <= sum(os.times()[:2]) + 0.1


@pytest.mark.slow
def test_the_command_prints_where_the_time_went(tmp_path: Path) -> None:
    settings = ["trainer.steps=8", "trainer.prompts_per_step=2", "rollout.group_size=2", "validation.every=0"]
    given = [each for setting in settings for each in ("--set", setting)]
    done = grpo(tmp_path, "train", "--env", "math:sort", "--profile", "3", "--output", "run", *given)
    assert done.returncode == 0, done.stderr
    for process in ("main", "trainer", "engine local", "environment of task 'sort'"):
        assert re.search(rf"^{process} +[0-9.]+", done.stdout, re.MULTILINE), done.stdout
    assert "backward" in done.stdout
    assert (tmp_path / "run" / "profile" / "trainer.trace.json.gz").exists()
