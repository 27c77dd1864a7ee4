"""``train --profile N`` traces the trainer, and prints where the time of each process went."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from test_cli import grpo
from test_trainer import batch, ragged, same, setup
from torch._C._autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent

from grpo_core.app import profile
from grpo_core.demo import tiny
from grpo_core.events import StepEnded
from grpo_core.training.profiling import StepProfiler
from grpo_core.training.setup import PROFILED_AFTER
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


class Traced:
    """A profiler that has traced these events, which are torch's own, and adds nothing."""

    def __init__(self, events: list[FunctionEvent]) -> None:
        self._events = EventList(events, use_device="cuda")
        self._events._build_tree()

    def start(self) -> None:
        pass

    def stop(self) -> None:
        pass

    def events(self) -> EventList:
        return self._events

    def key_averages(self) -> EventList:
        return self._events.key_averages()

    def export_chrome_trace(self, path: str) -> None:
        pass


def event(
    name: str, begin: float, end: float, *kernels: float, thread: int = 1, **more: Any
) -> FunctionEvent:
    """An event as torch makes it of a trace of a GPU."""
    made = FunctionEvent(0, name, thread, begin, end, use_device="cuda", **more)
    for microseconds in kernels:
        made.append_kernel("kernel", 0, microseconds)
    return made


GPU = {"device_type": DeviceType.CUDA, "thread": 7}
TRACED = [
    event("grpo_core: forward", 0, 100, is_user_annotation=True),
    event("aten::linear", 5, 40),
    event("aten::mm", 10, 30, 500, 200),
    event("grpo_core: backward", 100, 200, is_user_annotation=True),
    event("aten::mm", 120, 130, 900, thread=2),  # in autograd's thread
    event("grpo_core: optimizer", 200, 300, is_user_annotation=True),
    event("_fused_adamw_", 210, 220, 400),
    event("aten::copy_", 310, 320, 50),  # between the parts
    event("grpo_core: forward", 50, 750, is_user_annotation=True, **GPU),  # later, and with gaps
    event("ampere_sgemm", 50, 750, **GPU),
]


def test_on_a_gpu_the_parts_and_operations_have_the_seconds_of_the_kernels_that_they_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backward pass launches its own in another thread.  No kernel is counted a second time."""
    seen: list[Any] = []

    def traced(activities: Any) -> Traced:
        seen.append(activities)
        return Traced(TRACED)

    monkeypatch.setattr(torch.profiler, "profile", traced)
    monkeypatch.setattr(torch.cuda, "synchronize", seen.append)
    profiler = StepProfiler(str(tmp_path), steps=1, rank=1, device=torch.device("cuda", 1))
    for _ in range(PROFILED_AFTER + 2):
        with profiler.step():
            pass
    kinds = torch.profiler.ProfilerActivity
    assert seen == [[kinds.CPU, kinds.CUDA], torch.device("cuda", 1)]
    told = json.loads((tmp_path / "trainer-2.json").read_text())
    assert told["parts"] == pytest.approx({"forward": 7e-4, "backward": 9e-4, "optimizer": 4e-4})
    assert [(each["name"], each["calls"]) for each in told["operations"]] == [
        ("aten::mm", 2),
        ("_fused_adamw_", 1),
        ("aten::copy_", 1),
    ]
    assert told["operations"][0]["seconds"] == pytest.approx(16e-4)


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
