"""The parameters of a model, read from the headers of its files."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

from grpo_core.kit import header_of, weight_files

NOT_LINEAR = (
    "lm_head", "embed_out", "embed_tokens", "embed_tokens_per_layer", "embed_in", "embed_positions",
    "word_embeddings", "tok_embeddings", "position_embeddings", "wte", "wpe",
)  # fmt: skip
"""Ends of the names of output layers and embeddings, in checkpoints of transformers."""


def parameters_in(directory: Path) -> int | None:
    """Count a model's parameters by the headers of its safetensors files, or return None."""
    shapes = shapes_in(directory)
    return None if shapes is None else sum(map(prod, shapes.values()))


def shapes_in(directory: Path) -> dict[str, tuple[int, ...]] | None:
    """Return the shapes of a model's parameters by the headers of its safetensors files; tied ones once.

    Returns None if the files do not tell: there are none, they are quantised, or they hold models of several
    kinds, for pictures for one.
    """
    try:
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        headers = [header_of(path) for path in weight_files(directory)]
        if {"quantization_config", "text_config"} & config.keys():
            return None
        shapes = {name: info["shape"] for header in headers for name, info in header.items()}
        if config.get("tie_word_embeddings"):
            shapes.pop("lm_head.weight", None)
        return {name: tuple(map(int, shape)) for name, shape in shapes.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None


def dtypes_in(directory: Path) -> dict[str, str]:
    """Return the dtype of each tensor in a model's files, such as "BF16"; empty if unknown."""
    try:
        headers = [header_of(path) for path in weight_files(directory)]
        return {name: info["dtype"] for header in headers for name, info in header.items()}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def lora_shapes(
    shapes: Mapping[str, Sequence[int]], rank: int, targets: Sequence[str]
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of adapters by name.

    Args:
        shapes: of the model's tensors by name.
        rank: of the adapters.
        targets: names of layers; empty for all linear layers but the output layer.
    """
    found: dict[str, tuple[int, ...]] = {}
    for layer, shape in _matrices(shapes):
        chosen = any(f".{layer}".endswith(f".{target}") for target in targets)
        if chosen if targets else not layer.endswith(NOT_LINEAR):
            rows, columns = shape
            found |= {f"{layer}.lora_A.weight": (rank, columns), f"{layer}.lora_B.weight": (rows, rank)}
    return found


def linear_parameters(shapes: Mapping[str, Sequence[int]]) -> int:
    """Count the parameters of linear layers but the output layer; stacked experts of a mixture are none."""
    return sum(
        prod(shape)
        for layer, shape in _matrices(shapes)
        if not layer.endswith(NOT_LINEAR) and ".experts." not in layer
    )


def _matrices(shapes: Mapping[str, Sequence[int]]) -> Iterator[tuple[str, Sequence[int]]]:
    """Yield the name of each layer whose weight is a matrix, and the shape of the weight."""
    for name, shape in shapes.items():
        layer = name.removesuffix(".weight")
        if layer != name and len(shape) == 2:
            yield layer, shape
