"""The memory of a trainer by part, computed from the number of parameters; pure.

The trainer holds float32 weights, their gradients, and the state of its optimizer, such as AdamW's two
moments.  The gradients are allocated in the first backward pass and the state at the end of the first update,
so a trainer that does not fit may well start.
"""

from __future__ import annotations

from grpo_core.records import MemoryPart

FLOAT32 = 4
"""Bytes of a parameter, of its gradient, and of each of AdamW's moments."""
PUBLISHED = "published weights"
ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


KEPT_ACTIVATIONS = 0.2
"""Share of the activations by which the heap of a trainer on a CPU outgrows what is allocated in it."""


def kept_bytes(parameters: int, activations: int) -> int:
    """Return the bytes of freed memory that a trainer on a CPU holds at its peak.

    Gradients and activations come and go in every step, and the holes that they leave do not fit those of the
    next one.  The figure is empirical: ``tests/benchmarks/bench_doctor.py`` measures it.
    """
    return FLOAT32 * parameters + int(KEPT_ACTIVATIONS * activations)


def trainer_parts(
    *,
    parameters: int,
    optimizer: int | None,
    dtype: str,
    device: str,
    transport: str,
    reference: bool,
    async_save: bool,
) -> list[MemoryPart]:
    """Return the parts that follow from the number of parameters alone: a run needs all of them.

    Args:
        parameters: number of parameters; tied ones count once.
        optimizer: bytes of the optimizer's state; None if the optimizer does not tell, which counts as 0.
        dtype: dtype of matrix products, and of the weights that engines receive.
        device: "host" or a GPU.
        transport: of the weights to engines.
        reference: whether the loss needs a frozen copy of the model.
        async_save: whether checkpoints are written from a copy.
    """
    tensor = FLOAT32 * parameters
    on_host = transport == "shm" or device == "host"
    kept = optimizer or 0
    smaller = "a smaller model"
    leaner = 'optimizer.name = "adamw_8bit" or "muon"'
    parts = [
        MemoryPart(name="weights", nbytes=tensor, device=device, change=smaller),
        MemoryPart(name="gradients", nbytes=tensor, device=device, change=smaller),
        MemoryPart(
            name="optimizer",
            nbytes=kept,
            device=device,
            change=leaner if kept >= 2 * tensor else smaller,
        ),
        MemoryPart(
            name=PUBLISHED,
            nbytes=ITEMSIZE[dtype] * parameters,
            device="host" if on_host else device,
            change='model.dtype = "bfloat16"' if dtype == "float32" else smaller,
        ),
    ]
    if reference:
        parts.append(
            MemoryPart(name="reference", nbytes=tensor, device=device, change="a loss without a reference")
        )
    if async_save:
        change = "checkpoint.async_save = false"
        parts.append(MemoryPart(name="checkpoint copy", nbytes=tensor + kept, change=change))
    return parts
