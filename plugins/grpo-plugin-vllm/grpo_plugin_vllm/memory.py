"""The memory of the engine ``vllm`` by part.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_core import EngineLoad, MemoryPart
from grpo_plugin_vllm.options import CPU_CACHE_MIB, share_of_gpu

ITEMSIZE = {"float32": 4, "bfloat16": 2, "float16": 2}


def memory(load: EngineLoad, **options: Any) -> Sequence[MemoryPart]:
    """Return the parts of an engine with these options.

    On a GPU vLLM allocates its share of the memory at the start, independent of the model's size.  While it
    sleeps, its weights are in host memory.
    """
    device = options.get("device", "auto")
    on_gpu = device == "cuda" or (device == "auto" and load.gpu_bytes > 0)
    shards = options.get("tensor_parallel", 1)
    devices = [f"cuda:{gpu}" for gpu in range(shards)] if on_gpu else ["host"]
    own = options.get("vllm") or {}
    cache = options.get("cache_mib")
    fraction = own.get("gpu_memory_utilization") or options.get("memory_fraction")
    fraction = fraction or share_of_gpu(load.shares_gpu)
    dtype = options.get("dtype", "auto")
    size = ITEMSIZE[load.dtype if dtype == "auto" else dtype] * load.parameters
    asleep = []
    if on_gpu and options.get("in_turn"):
        change = "engine.options.in_turn = false"
        asleep = [MemoryPart(name="weights while it sleeps", nbytes=size, change=change)]
    if on_gpu and cache is None and "kv_cache_memory_bytes" not in own:
        return asleep + [
            MemoryPart(
                name="weights, keys and values",
                nbytes=int(fraction * load.gpu_bytes),
                device=device,
                certain=not options.get("in_turn"),  # freed while the trainer computes
                change="engine.options.memory_fraction",
            )
            for device in devices
        ]
    held = own.get("kv_cache_memory_bytes", (cache or CPU_CACHE_MIB) << 20)
    smaller = 'engine.options.dtype = "bfloat16"'
    return asleep + [
        part
        for device in devices
        for part in (
            MemoryPart(name="weights", nbytes=size // shards, device=device, change=smaller),
            MemoryPart(name="keys and values", nbytes=held, device=device, change="engine.options.cache_mib"),
        )
    ]
