"""Converts GGUF to a transformers directory: ``python -m grpo_plugin_smollm2.convert GGUF DIRECTORY``."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_plugin_smollm2.source import ORIGIN, POSITIONS


def convert(weights: Path, directory: Path) -> None:
    """Write the model in bfloat16, its published dtype, with its tokenizer and chat template."""
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    # the published tokenizer splits digits first, which transformers does not read from the file
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    # transformers 5.17 takes <|im_start|> for the end of a turn, and warns of the spaces
    tokenizer.add_special_tokens({"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"})
    tokenizer.clean_up_tokenization_spaces = False
    tokenizer.model_max_length = POSITIONS
    read = AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    config = read.config
    vars(config).pop("quantization_config", None)  # no longer quantised
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    (directory / "README.md").write_text(f"# smollm2\n\n{ORIGIN}.\n", encoding="utf-8")
    for path in directory.iterdir():  # durable before the directory is renamed
        with path.open("rb") as file:
            os.fsync(file)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
