"""``train --profile N`` traces the trainer with torch's profiler."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import attrs
import pytest
from test_cli import grpo
from test_trainer import batch, ragged, same, setup

from grpo_core.demo import tiny
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
        assert (tmp_path / "profile" / "trainer.txt").exists() is (step >= 3)
    assert same(plain, traced)
    table = (tmp_path / "profile" / "trainer.txt").read_text()
    assert "grpo_core: backward" in table
    assert "aten::" in table
    trace = json.loads(gzip.decompress((tmp_path / "profile" / "trainer.trace.json.gz").read_bytes()))
    names = [event.get("name") for event in trace["traceEvents"]]
    assert names.count("grpo_core: optimizer") == 2


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("steps", "told"), [(5, "the traces of 3 steps"), (4, "no profile was written: it needs 5 steps")]
)
def test_the_command_says_where_the_traces_are(tmp_path: Path, steps: int, told: str) -> None:
    settings = ["trainer.prompts_per_step=2", "rollout.group_size=2", "validation.every=0"]
    given = [each for setting in (f"trainer.steps={steps}", *settings) for each in ("--set", setting)]
    done = grpo(tmp_path, "train", "--env", "math:sort", "--profile", "3", "--output", "run", *given)
    assert done.returncode == 0, done.stderr
    assert told in done.stdout
    assert (tmp_path / "run" / "profile" / "trainer.trace.json.gz").exists() is (steps == 5)
