"""Writes the table of docs/one-gpu.md: which configuration of a large model fits cards of 80 GB.

python docs/_fits.py

It asks the estimate with which `train` refuses a run, about shapes without memory.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from grpo_core import ConfigError
from grpo_core.app import launch
from grpo_core.config import parse_settings
from grpo_core.kit import files
from grpo_plugin_doctor import activations, machine, memory
from grpo_plugin_doctor.machine import Gpu, Memory

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from _blocks import filled  # noqa: E402

PAGE = HERE / "one-gpu.md"
GIB = 1 << 30
H100 = Gpu(name="H100", memory=Memory(total=int(79.6 * GIB), available=int(79.1 * GIB)), driver="")
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
LORA = "model.lora.rank=16"
ROWS: Sequence[tuple[str, str, Sequence[str]]] = (
    ("Qwen3-0.6B", "0.6B", ()),
    ("Qwen3-4B", "4B", ()),
    ("Qwen3-8B with `[model.lora]`", "8B", (LORA,)),
    ("Qwen3-30B-A3B", "30B-A3B", ()),
    ("Qwen3-30B-A3B with `[model.lora]`", "30B-A3B", (LORA,)),
)
"""Titles, models and settings."""
CHANGES: Sequence[Sequence[str]] = (
    (),
    *(
        [f"{key}={value}" for key, value in keys.items()]
        for keys in memory.SMALLER
        if "model.lora.rank" not in keys
    ),
    ("trainer.activations=recompute", "optimizer.name=adamw_8bit", "engine.options.memory_fraction=0.3"),
)
"""Changes, of which the first counts with which the run fits."""


model_shapes = functools.cache(activations.model_shapes)
activation_bytes = functools.cache(activations.activation_bytes)
"""Most rows of the table ask for the same passes, each of which takes seconds."""


@functools.cache
def written(model: str) -> TemporaryDirectory[str]:
    """Write a model's configuration."""
    directory = TemporaryDirectory()
    Path(directory.name, "config.json").write_text(json.dumps(MODELS[model]), encoding="utf-8")
    return directory


@contextmanager
def cards(model: str, count: int) -> Iterator[str]:
    """Pretend that this machine has some H100s and a model."""
    directory = written(model).name
    shapes = model_shapes(directory).tensors
    answers = {
        (machine, "host_memory"): HOST,
        (machine, "build_of_torch"): "cuda 13.0",
        (machine, "gpus"): [H100] * count,
        (files, "directory_here"): Path(directory),
        (memory, "shapes_in"): shapes,
        (memory, "dtypes_in"): dict.fromkeys(shapes, "BF16"),
    }
    patches = [mock.patch.object(*where, return_value=answer) for where, answer in answers.items()]
    patches += [
        mock.patch.object(activations, "model_shapes", model_shapes),
        mock.patch.object(activations, "activation_bytes", activation_bytes),
        mock.patch.dict("os.environ", {"CUDA_VISIBLE_DEVICES": ",".join(map(str, range(count)))}),
    ]
    with ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        yield directory


def check(model: str, count: int, *settings: str) -> None:
    """Check a run with rows of 1,280 tokens as `train` does.  Raises ConfigError if it cannot fit."""
    wanted = ["engine.name=vllm", "rollout.max_tokens=1024", "trainer.prompts_per_step=8", *settings]
    given = parse_settings(wanted, {"model": {"path": "m"}, "tasks": launch.tasks_of(["math:sort"])})
    with cards(model, count):
        memory.checked(*launch.configure([], given))


def cell(model: str, count: int, settings: Sequence[str]) -> str:
    """Return the first changes with which a run fits, or what it needs at least."""
    least = float("inf")
    for changes in CHANGES:
        try:
            check(model, count, *settings, *changes)
        except ConfigError as error:
            if found := re.search(r"needs at least ([\d.]+) GiB", str(error)):
                least = min(least, float(found[1]))
            continue
        return ", ".join(f"`{change}`" for change in changes) or "as it is"
    return f"none: at least {least:.0f} GiB"


def page() -> str:
    """Return the page."""
    rows = [
        f"| {title} | {cell(model, 1, settings)} | {cell(model, 2, settings)} |"
        for title, model, settings in ROWS
    ]
    head = ["| model | one card of 80 GB | two |", "|---|---|---|"]
    return filled(PAGE.read_text(encoding="utf-8"), {"fits": "\n".join([*head, *rows])})


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
