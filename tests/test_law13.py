"""Law 13: what is read of a version is, bit for bit, what the engines held at that version."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import grpo_core
from grpo_core import ConfigError, Run
from grpo_core.commands import export
from grpo_core.config import ScoreConfig
from grpo_core.training.passes import Passes
from grpo_core.training.scores import FrozenModel
from grpo_core.weights.layout import checksum
from grpo_core.weights.names import checkpoint_tensors

HELD = Path(__file__).with_name("held.py")
ENGINE = f"{HELD}:Recorded"
TINY = {"path": "tiny", "options": {"width": 16, "layers": 1, "warm_start_steps": 0}}
SHORT = {
    "env": f"{HELD}:Varied",
    "trainer": {"steps": 2, "prompts_per_step": 2, "threads": 1, "lr": 1e-3},
    "rollout": {"group_size": 4, "max_tokens": 8},
    "pipeline": {"max_staleness": 0},
    "validation": {"prompts": 8, "every": 1},
    "checkpoint": {"every": 1},
    "tracking": {"trackers": ["files"]},
}


def trained(where: Path, *, model=None, engine=None, name=ENGINE, **others) -> Run:
    """A short run, whose engine writes ``held.jsonl``."""
    options = {"log": str(where / "held.jsonl"), **(engine or {})}
    settings = {**SHORT, "model": {**TINY, **(model or {})}, **others}
    return grpo_core.train(output=where / "run", engine={"name": name, "options": options}, **settings)


def held(where: Path) -> list[tuple[int, dict[str, int]]]:
    lines = (where / "held.jsonl").read_text().splitlines()
    return [(line["version"], line["sums"]) for line in map(json.loads, lines)]


def reward(run: Run, step: int) -> float:
    return next(row["reward"] for row in run.validations() if row["step"] == step)


def of(tensors) -> dict[str, int]:
    return {name: checksum(tensor) for name, tensor in tensors.items()}


def files(directory: Path) -> dict[str, int]:
    return of(
        {name: each for path in directory.glob("*.safetensors") for name, each in load_file(path).items()}
    )


def trainer_of(run: Run, step: int) -> Path:
    return run.checkpoints[step] / "trainer"


DTYPES = {
    "float32": ({}, {}),
    "bfloat16": ({"dtype": "bfloat16"}, {}),
    "float16": ({}, {"dtype": "float16"}),
    "narrower": ({"dtype": "float32"}, {"dtype": "bfloat16"}),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", *(pytest.param(name, marks=pytest.mark.nightly) for name in DTYPES if name != "bfloat16")],
)
def test_every_reader_gets_the_bits_that_the_engine_held(tmp_path: Path, dtype: str) -> None:
    model, engine = DTYPES[dtype]
    run = trained(tmp_path, model=model, engine=engine)
    by_version = dict(held(tmp_path))
    assert by_version[0] != by_version[1] != by_version[2]
    for step in (1, 2):
        assert of(checkpoint_tensors(run.model(step))) == by_version[step]
        out = tmp_path / f"out-{step}"
        assert export.export(run.path, step=step, output=out) == 0
        assert files(out) == by_version[step]
        loaded = transformers.AutoModelForCausalLM.from_pretrained(out, dtype="auto")
        assert of(checkpoint_tensors(loaded)) == by_version[step]
        grpo_core.validate(run, step=step)
        assert held(tmp_path)[-1] == (step, by_version[step])
    named = {"narrower": "bfloat16"}.get(dtype, dtype)
    assert json.loads((out / "config.json").read_text())["dtype"] == named
    assert f"Weights: {named}" in (out / "README.md").read_text()
    teacher = FrozenModel(
        ScoreConfig(weights=str(trainer_of(run, 2)), dtype="float32"), torch.device("cpu"), Passes()
    )
    exact = load_file(out / "model.safetensors")
    for name, tensor in checkpoint_tensors(teacher._scorer.module).items():
        assert torch.equal(tensor, exact[name].float())


@pytest.mark.nightly
def test_a_resume_and_a_new_run_from_a_checkpoint_begin_with_the_bits_that_the_engine_held(
    tmp_path: Path,
) -> None:
    run = trained(tmp_path, model={"dtype": "bfloat16"})
    last = dict(held(tmp_path))[2]
    with pytest.raises(ConfigError, match="held weights in bfloat16, and would hold them in float32"):
        grpo_core.train(resume=run, trainer={"steps": 3}, model={"dtype": "float32"})
    with pytest.raises(ConfigError, match="held weights in bfloat16, and would hold them in float32"):
        grpo_core.train(resume=run, trainer={"steps": 3}, model={"dtype": "auto"})  # as on another machine
    assert run.config["model"]["dtype"] == "bfloat16"
    grpo_core.train(resume=run, trainer={"steps": 3})
    assert (2, last) in held(tmp_path)[-2:]
    grpo_core.validate(run, step=2)
    assert held(tmp_path)[-1] == (2, last)
    begun = tmp_path / "begun"
    begun.mkdir()
    other = trained(begun, model={"path": str(trainer_of(run, 2)), "options": {}, "dtype": "float32"})
    assert held(begun)[0][0] == 0
    exact = load_file(other.path / "model" / "model.safetensors")
    assert of(exact) == last
    assert held(begun)[0][1] == of({name: each.float() for name, each in exact.items()})


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_adapters_are_read_as_they_were_published_and_merged_as_the_engine_added_them(
    tmp_path: Path, dtype: str
) -> None:
    run = trained(tmp_path, model={"dtype": dtype, "lora": {"rank": 4, "alpha": 6}})
    by_version = dict(held(tmp_path))
    assert by_version[1] != by_version[2]
    grpo_core.validate(run, step=2)
    assert held(tmp_path)[-1] == (2, by_version[2])
    assert export.export(run.path, output=tmp_path / "merged", merged=True) == 0
    assert files(tmp_path / "merged") == by_version[2]
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["dtype"] == dtype
    assert export.export(run.path, output=tmp_path / "adapters") == 0
    adapters = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert {str(each.dtype) for each in adapters.values()} == {f"torch.{dtype}"}
    record = json.loads((trainer_of(run, 2) / "published.json").read_text())["tensors"]
    for name, (_, expected) in record.items():
        assert checksum(adapters[f"base_model.model.{name}"]) == expected
    for name, each in run.model(2).named_parameters():
        if ".lora_" in name:
            assert torch.equal(each, adapters[name.replace(".default.", ".")].float())


@pytest.mark.slow
def test_ranks_write_what_they_published(tmp_path: Path) -> None:
    """Full weights in bfloat16; a rank has a part of each tensor."""
    run = trained(tmp_path, model={"dtype": "bfloat16"}, trainer={**SHORT["trainer"], "ranks": 2})
    by_version = dict(held(tmp_path))
    for step in (1, 2):
        assert of(checkpoint_tensors(run.model(step))) == by_version[step]
    grpo_core.validate(run, step=1)
    assert held(tmp_path)[-1] == (1, by_version[1])


@pytest.mark.slow
def test_an_engine_of_validation_in_float32_measures_the_rounded_policy(tmp_path: Path) -> None:
    """The engine of training holds bfloat16; that of validation computes with the same numbers in float32."""
    log = str(tmp_path / "validated.jsonl")
    wide = {"name": ENGINE, "options": {"log": log, "dtype": "float32"}}
    run = trained(
        tmp_path, model={"dtype": "bfloat16"}, validation={**SHORT["validation"], "every": 2, "engine": wide}
    )
    sums = dict(held(tmp_path))[2]
    tensors = checkpoint_tensors(run.model(2))
    assert of(tensors) == sums
    widened = of({name: each.float() for name, each in tensors.items()})
    lines = [json.loads(line) for line in Path(log).read_text().splitlines()]
    assert (lines[-1]["version"], lines[-1]["sums"]) == (2, widened)
    assert grpo_core.validate(run, step=2)["varied"]["reward"] == reward(run, 2)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("vllm") is None, reason="vLLM is not installed: make install-vllm"
)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_what_vllm_measured_is_measured_again(tmp_path: Path, dtype: str) -> None:
    """Greedy replies of vLLM to the weights of a checkpoint are those of the run; LoRA is another test's."""
    name = f"{HELD.with_name('held_by_vllm.py')}:Recorded"
    run = trained(tmp_path, name=name, model={"dtype": dtype, "options": {**TINY["options"], "width": 128}})
    by_version = dict(held(tmp_path))
    for step in (1, 2):
        assert of(checkpoint_tensors(run.model(step))) == by_version[step]
        assert grpo_core.validate(run, step=step)["varied"]["reward"] == reward(run, step)
        assert held(tmp_path)[-1] == (step, by_version[step])
