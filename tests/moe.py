"""Small random models with experts, for tests of what travels from the trainer to an engine."""

from __future__ import annotations

from pathlib import Path

import torch

from grpo_core.demo.demonstrations import POSITIONS
from grpo_core.demo.tiny import CHARACTERS, write_tokenizer

FAMILIES = ("mixtral", "qwen3_moe", "glm4_moe")


def make_moe_model(directory: Path, family: str, *, experts: int = 4) -> Path:
    """Write a random model of two layers, its heads as wide as vLLM's kernels for CPUs want them."""
    import transformers

    common = {
        "vocab_size": 3 + len(CHARACTERS),
        "hidden_size": 128,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": POSITIONS,
        "num_experts_per_tok": 2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "initializer_range": 0.05,
    }
    match family:
        case "mixtral":
            config = transformers.MixtralConfig(num_local_experts=experts, sliding_window=None, **common)
        case "qwen3_moe":
            config = transformers.Qwen3MoeConfig(
                num_experts=experts, head_dim=32, moe_intermediate_size=64, tie_word_embeddings=True, **common
            )
        case "glm4_moe":  # its bias that chooses experts is a persistent buffer, as DeepSeek's
            config = transformers.Glm4MoeConfig(
                n_routed_experts=experts,
                n_shared_experts=1,
                head_dim=32,
                moe_intermediate_size=64,
                first_k_dense_replace=1,
                **common,
            )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand_like(buffer))
    model.save_pretrained(directory)
    write_tokenizer(directory)
    return directory
