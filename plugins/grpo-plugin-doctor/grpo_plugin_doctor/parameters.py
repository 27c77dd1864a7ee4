"""The parameters of a model, read from the headers of its files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

from grpo_core import ModelError
from grpo_core.models.files import ModelFiles

NOT_LINEAR = (
    "lm_head", "embed_out", "embed_tokens", "embed_tokens_per_layer", "embed_in", "embed_positions",
    "word_embeddings", "tok_embeddings", "position_embeddings", "wte", "wpe",
)  # fmt: skip
"""Suffixes of the names of output layers and embeddings in checkpoints of transformers."""


def shapes_in(directory: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of a model's parameters from the headers of its safetensors files; tied ones once.

    Returns None if they are unknown: there are no files, the model is quantised, or it is multimodal.
    """
    files = ModelFiles(directory)
    try:
        config = files.config
    except ModelError:
        return None
    if not files.tensors or {"quantization_config", "text_config"} & config.keys():
        return None
    shapes = {name: tensor.shape for name, tensor in files.tensors.items()}
    if config.get("tie_word_embeddings"):
        shapes.pop("lm_head.weight", None)
    return shapes


def lora_shapes(
    shapes: Mapping[str, Sequence[int]], rank: int, targets: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of adapters by name.

    Args:
        shapes: shapes of the model's tensors by name.
        rank: rank of the adapters.
        targets: names of layers; empty for all linear layers except the output layer.
    """
    found: dict[str, tuple[int, ...]] = {}
    for layer, shape in _matrices(shapes):
        chosen = any(f".{layer}".endswith(f".{target}") for target in targets)
        if chosen if targets else not layer.endswith(NOT_LINEAR):
            rows, columns = shape
            found |= {f"{layer}.lora_A.weight": (rank, columns), f"{layer}.lora_B.weight": (rows, rank)}
    return found


def linear_parameters(shapes: Mapping[str, Sequence[int]]) -> int:
    """Count the parameters of linear layers, without the output layer and stacked experts."""
    return sum(
        prod(shape)
        for layer, shape in _matrices(shapes)
        if not layer.endswith(NOT_LINEAR) and ".experts." not in layer
    )


def _matrices(shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield name and weight shape of each layer whose weight is a matrix."""
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if layer != name and len(shape) == 2:
            yield layer, shape
