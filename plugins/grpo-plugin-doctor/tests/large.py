"""Large models as sparse files."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import torch

EIGHT = {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "tie_word_embeddings": False, "max_position_embeddings": 8192,
}  # fmt: skip
EIGHT_PARAMETERS = 8_030_261_248


def model_files(directory: Path, config: dict[str, object], tensors: dict[str, list[int]]) -> Path:
    """Write a model directory whose weights are a hole in a file: a real header, and no bytes on the disk."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer_config.json").write_text("{}")
    offset, header = 0, {}
    for name, shape in tensors.items():
        size = 2 * torch.Size(shape).numel()
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    packed = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(packed)) + packed)
        file.truncate(8 + len(packed) + offset)
    return directory


def eight_billion(directory: Path) -> Path:
    d, i, v, kv = 4096, 14336, 128256, 1024
    tensors = {"model.embed_tokens.weight": [v, d], "lm_head.weight": [v, d], "model.norm.weight": [d]}
    for layer in range(32):
        own = {"input_layernorm": [d], "post_attention_layernorm": [d], "mlp.gate_proj": [i, d],
               "mlp.up_proj": [i, d], "mlp.down_proj": [d, i], "self_attn.q_proj": [d, d],
               "self_attn.k_proj": [kv, d], "self_attn.v_proj": [kv, d],
               "self_attn.o_proj": [d, d]}  # fmt: skip
        tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in own.items()}
    return model_files(directory, EIGHT, tensors)
