"""The memory of a trainer by part, computed from the number of parameters; pure.

The trainer holds float32 weights and, of the parameters that it trains, gradients and the state of its
optimizer, such as AdamW's two moments.  The gradients are allocated in the first backward pass and the state
at the end of the first update, so a trainer that does not fit may well start.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

from grpo_core.records import MemoryPart

FLOAT32 = 4
"""Bytes of a parameter, of its gradient, and of each of AdamW's moments."""
WEIGHTS = "weights"
PUBLISHED = "published weights"
REFERENCE = "reference"
TEACHER = "teacher"
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}

NOT_LINEAR = (
    "lm_head", "embed_out", "embed_tokens", "embed_tokens_per_layer", "embed_in", "embed_positions",
    "word_embeddings", "tok_embeddings", "position_embeddings", "wte", "wpe",
)  # fmt: skip
"""Ends of the names of output layers and embeddings, in checkpoints of transformers."""
KEPT_ACTIVATIONS = 0.2
"""Share of the activations by which the heap of a trainer on a CPU outgrows what is allocated in it."""


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


def kept_bytes(trained: int, activations: int) -> int:
    """Return the bytes of freed memory that a trainer on a CPU holds at its peak.

    Gradients and activations come and go in every step, and the holes that they leave do not fit those of the
    next one.  The figure is empirical: ``tests/benchmarks/bench_doctor.py`` measures it.
    """
    return FLOAT32 * trained + int(KEPT_ACTIVATIONS * activations)


def trainer_parts(
    *,
    parameters: int,
    trained: int,
    published: int,
    optimizer: int | None,
    dtype: str,
    device: str,
    on_device: bool,
    reference: bool,
    async_save: bool,
    teacher: int = 0,
) -> list[MemoryPart]:
    """Return the parts that follow from the number of parameters alone: a run needs all of them.

    Args:
        parameters: number of parameters; tied ones count once.
        trained: number of those that the optimizer changes: all of them, or the adapters, which come on top.
        published: number of parameters that a weight sync sends.
        optimizer: bytes of the optimizer's state; None if the optimizer does not tell, which counts as 0.
        dtype: dtype of the weights that engines receive.
        device: "host" or a GPU.
        on_device: whether the trainer keeps published weights on its device.
        reference: whether the loss needs logprobs of a reference; adapters need no second model for it.
        async_save: whether checkpoints are written from a copy.
        teacher: bytes of the teacher's weights; 0 without a teacher.
    """
    tensor, changed = FLOAT32 * parameters, FLOAT32 * trained
    adapters = trained != parameters
    on_host = not on_device or device == "host"
    kept = optimizer or 0
    smaller = "a smaller model"
    fewer = "model.lora.rank" if adapters else smaller
    leaner = 'optimizer.name = "adamw_8bit" or "muon"'
    parts = [
        MemoryPart(name=WEIGHTS, nbytes=tensor, device=device, change=smaller),
        MemoryPart(name="gradients", nbytes=changed, device=device, change=fewer),
        MemoryPart(
            name="optimizer",
            nbytes=kept,
            device=device,
            change=leaner if kept >= 2 * changed else fewer,
        ),
        MemoryPart(
            name=PUBLISHED,
            nbytes=ITEMSIZE[dtype] * published,
            device="host" if on_host else device,
            change='model.dtype = "bfloat16"' if dtype == "float32" else smaller,
        ),
    ]
    if adapters:
        parts.append(MemoryPart(name="adapters", nbytes=changed, device=device, change=fewer))
    elif reference:
        parts.append(
            MemoryPart(name=REFERENCE, nbytes=tensor, device=device, change="a loss without a reference")
        )
    if teacher:
        change = 'a smaller teacher, teacher.dtype = "bfloat16"'
        parts.append(MemoryPart(name=TEACHER, nbytes=teacher, device=device, change=change))
    if async_save:
        change = "checkpoint.async_save = false"
        parts.append(MemoryPart(name="checkpoint copy", nbytes=changed + kept, change=change))
    return parts
