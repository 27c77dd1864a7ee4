"""The memory of the engine ``local`` by part; pure."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_core.contracts.records import EngineLoad, MemoryPart

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}
COLUMNS = 1.6
"""Columns of keys and values for each token of the longest row.

It is 1 if all rows begin together, and 2 if they come and go: columns are reused once half are free.  The
value is from ``tests/benchmarks/bench_doctor.py`` in asynchronous runs.
"""


def memory(
    load: EngineLoad, *, device: str = "auto", dtype: str = "auto", max_rows: int = 512
) -> Sequence[MemoryPart]:
    """Return the parts of an engine with these options."""
    where = ("cuda" if load.gpu_bytes else "cpu") if device == "auto" else device
    where = "host" if where == "cpu" else where
    size = ITEMSIZE[load.dtype if dtype == "auto" else dtype]
    rows = min(load.requests, max_rows)
    config = load.config
    vocabulary, width = config.get("vocab_size", 0), config.get("hidden_size", 0)
    heads = config.get("num_attention_heads", 0)
    head = config.get("head_dim") or (width // heads if heads else 0)
    per_token = 2 * config.get("num_hidden_layers", 0) * (config.get("num_key_value_heads") or heads) * head
    parts = [
        MemoryPart(
            name="weights",
            nbytes=size * load.parameters,
            device=where,
            change='engine.options.dtype = "bfloat16"' if size > 2 else "a smaller model",
        ),
        MemoryPart(
            name="keys and values",
            nbytes=int(COLUMNS * rows * load.tokens * per_token * size),
            device=where,
            certain=False,
            change="engine.options.max_rows",
        ),
        MemoryPart(
            name="logits",
            nbytes=2 * rows * vocabulary * 4,
            device=where,
            certain=False,
            change="engine.options.max_rows",
        ),
    ]
    if config.get("tie_word_embeddings") and where == "host":  # in another layout than the embedding
        parts.append(MemoryPart(name="head", nbytes=size * vocabulary * width, device=where, certain=False))
    return parts
