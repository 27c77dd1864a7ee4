"""The memory of a trainer by part, computed from the number of parameters; pure.

The trainer holds float32 weights and, of the parameters that it trains, gradients and the state of its
optimizer, such as AdamW's two moments.  The gradients are allocated in the first backward pass and the state
at the end of the first update, so a trainer that does not fit may still start.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core.config import ScoreConfig
from grpo_core.contracts.records import MemoryPart

FLOAT32 = 4
"""Bytes of a parameter, of its gradient, and of each of AdamW's moments."""
PUBLISHED = "published weights"
MODELS = "scoring models"
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def kept_weights(scores: Mapping[str, ScoreConfig]) -> tuple[str, ...]:
    """Return the names of the weights that a trainer keeps: "start", and the name of each "ema"."""
    start = {"start" for each in scores.values() if each.weights == "start"}
    return tuple(sorted(start | {name for name, each in scores.items() if each.weights == "ema"}))


def trainer_parts(
    *,
    config: object,
    weights: int,
    parameters: int,
    trained: int,
    published: int,
    optimizer: int | None,
    dtype: str,
    device: str,
    on_device: bool,
    kept: int,
    models: int = 0,
) -> list[MemoryPart]:
    """Return the parts that the number of parameters determines: a run needs all of them.

    Args:
        config: of the run, for trainers that hold more than this.
        weights: bytes of all parameters.
        parameters: number of parameters; tied ones count once.
        trained: number of parameters that the optimizer changes: all, or the additional adapters.
        published: number of parameters that a weight sync sends.
        optimizer: bytes of the optimizer's state; None if unknown, which counts as 0.
        dtype: dtype of the weights that engines receive.
        device: "host" or a GPU.
        on_device: whether the trainer keeps published weights on its device.
        kept: copies of the weights that score (``ModelSource.kept``); adapters need no second model for them.
        models: bytes of the weights of other models that score.
    """
    changed = FLOAT32 * trained
    adapters = trained != parameters
    on_host = not on_device or device == "host"
    state = optimizer or 0
    smaller = "a smaller model"
    fewer = "model.lora.rank" if adapters else smaller
    leaner = 'optimizer.name = "adamw_8bit" or "muon"'
    parts = [
        MemoryPart(name="weights", nbytes=weights, device=device, change=smaller),
        MemoryPart(name="gradients", nbytes=changed, device=device, change=fewer),
        MemoryPart(
            name="optimizer",
            nbytes=state,
            device=device,
            change=leaner if state >= 2 * changed else fewer,
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
    elif kept:
        parts.append(
            MemoryPart(
                name="kept weights",
                nbytes=FLOAT32 * parameters * kept,
                device=device,
                change="a loss with fewer scores",
            )
        )
    if models:
        change = 'scores of a smaller model, its dtype = "bfloat16"'
        parts.append(MemoryPart(name=MODELS, nbytes=models, device=device, change=change))
    if device != "host":
        copied = max(changed, state)  # a checkpoint's weights, then the state of the optimizer
        parts.append(MemoryPart(name="checkpoint copy", nbytes=copied, certain=False, change=fewer))
    return parts
