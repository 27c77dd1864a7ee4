"""Which run of a model as large as real ones fits a GPU of 80 GB: shapes without memory, and no GPU."""

from __future__ import annotations

import json

import pytest

from grpo_core import ConfigError
from grpo_core.kit import configure, parse_settings, tasks_of
from grpo_plugin_doctor import machine, memory
from grpo_plugin_doctor.activations import model_shapes
from grpo_plugin_doctor.machine import Gpu, Memory

GIB = 1 << 30
H100 = Memory(total=int(79.6 * GIB), available=int(79.1 * GIB))
HOST = Memory(total=2000 * GIB, available=2000 * GIB)
QWEN = {
    "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8,
    "max_position_embeddings": 40960, "tie_word_embeddings": True,
}  # fmt: skip
MODELS = {
    "0.6B": QWEN | {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
                    "num_attention_heads": 16},
    "4B": QWEN | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
                  "num_attention_heads": 32},
    "8B": QWEN | {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36,
                  "num_attention_heads": 32, "tie_word_embeddings": False},
    "30B-A3B": QWEN | {"model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
                       "moe_intermediate_size": 768, "num_hidden_layers": 48, "num_attention_heads": 32,
                       "num_key_value_heads": 4, "num_experts": 128, "num_experts_per_tok": 8,
                       "tie_word_embeddings": False},
}  # fmt: skip
RECOMPUTE = "trainer.activations=recompute"

pytestmark = pytest.mark.long


@pytest.fixture
def check(tmp_path, monkeypatch):
    """Check a run of a model on some H100s."""
    monkeypatch.setattr(machine, "host_memory", lambda root=None: HOST)
    monkeypatch.setattr(machine, "build_of_torch", lambda: "cuda 13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def checked(model, gpus, *settings):
        (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
        shapes = model_shapes(str(tmp_path)).tensors
        monkeypatch.setattr(memory, "directory_here", lambda path: tmp_path)
        monkeypatch.setattr(memory, "shapes_in", lambda path: shapes)
        monkeypatch.setattr(memory, "dtypes_in", lambda path: dict.fromkeys(shapes, "BF16"))
        monkeypatch.setattr(machine, "gpus", lambda: [Gpu(name="H100", memory=H100, driver="")] * gpus)
        wanted = ["engine.name=vllm", "rollout.max_tokens=1024", "trainer.prompts_per_step=8", *settings]
        given = parse_settings(wanted, {"model": {"path": "m"}, "tasks": tasks_of(["math:sort"])})
        config, host = configure([], given)
        memory.checked(config, host)

    return checked


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpus", "settings"),
    [
        ("0.6B", 1, []),
        ("0.6B", 2, []),
        ("4B", 2, [RECOMPUTE]),
        ("8B", 1, ["model.lora.rank=16", RECOMPUTE]),
        ("8B", 2, ["model.lora.rank=16", RECOMPUTE]),
    ],
    ids=str,
)
def test_what_the_documents_recommend_fits(check, model, gpus, settings):
    check(model, gpus, *settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "gpus", "settings", "message"),
    [
        ("0.6B", 1, ["engine.options.memory_fraction=0.85"], f"The run fits with --set {RECOMPUTE}"),
        ("4B", 2, [], f"trainer's activations .*The run fits with --set {RECOMPUTE}"),
        ("8B", 2, ["model.lora.rank=16"], f"trainer's activations .*The run fits with --set {RECOMPUTE}"),
        ("30B-A3B", 2, [], r"needs at least 4\d\d GiB of GPU"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_before_anything_is_loaded(check, model, gpus, settings, message):
    with pytest.raises(ConfigError, match=message):
        check(model, gpus, *settings)
