"""Models whose experts cannot be sharded are refused by the headers of their files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from moe import FAMILIES, make_moe_model
from test_trainer import setup

from grpo_core import ConfigError
from grpo_core.app import launch
from grpo_core.config import parse_settings
from grpo_plugin_scale.config import check
from grpo_plugin_scale.training.trainer import create

DIVIDED = ["trainer.ranks=2"], ["trainer.weights=bfloat16", "model.dtype=bfloat16"]


def checked(model: Path, *settings: str) -> None:
    config, host = launch.configure(
        [],
        parse_settings(
            list(settings), {"model": {"path": str(model)}, "tasks": launch.tasks_of(["math:sort"])}
        ),
    )
    check(config=config, host=host)


def write_headers(directory: Path, names: list[str]) -> Path:
    """Write a model of 3 TiB that has no numbers, so that nothing could load it."""
    directory.mkdir()
    size = (1 << 40) // len(names)
    header = {
        name: {"dtype": "F32", "shape": [size // 4], "data_offsets": [nth * size, (nth + 1) * size]}
        for nth, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    for name in ("config.json", "tokenizer_config.json"):
        (directory / name).write_text("{}")
    return directory


@pytest.mark.parametrize("settings", [*DIVIDED, ["trainer.ranks=2", "model.lora.rank=4"]], ids=str)
def test_experts_that_are_divided_are_refused_before_the_model_is_loaded(tmp_path, settings):
    names = [f"model.layers.0.mlp.experts.{nth}.up_proj.weight" for nth in range(4)]
    model = write_headers(tmp_path / "huge", names)
    with pytest.raises(ConfigError, match=r"trainer\.(ranks = 2|weights = .bfloat16.): .*experts") as found:
        checked(model, *settings)
    assert str(model) in str(found.value)
    assert "1024.0 GiB" in str(found.value)
    assert 'trainer.ranks = 1 and trainer.weights = "float32"' in str(found.value)
    checked(model)  # in one process


def test_experts_that_came_from_a_hub_are_refused_by_the_trainer_before_it_loads_them(tmp_path):
    model = write_headers(tmp_path / "huge", ["model.layers.0.mlp.experts.0.up_proj.weight"])
    with pytest.raises(ConfigError, match="mixture of experts"):
        create(setup(str(model), ranks=2))


@pytest.mark.parametrize("settings", DIVIDED, ids=str)
def test_experts_that_the_checkpoint_has_in_one_tensor_are_divided(tmp_path, settings):
    """Models such as gpt-oss, and those saved under the names of transformers' modules, keep experts so."""
    checked(write_headers(tmp_path / "huge", ["model.layers.0.mlp.experts.gate_up_proj"]), *settings)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_that_transformers_stacks_are_known_by_their_names(tmp_path, family):
    with pytest.raises(ConfigError, match="experts"):
        checked(make_moe_model(tmp_path / "m", family), "trainer.ranks=2")
