"""Memory that an engine needs while it takes new weights, in addition to the weights themselves.

    python tests/benchmarks/bench_update_memory.py [--engine local|vllm] [--transport shm|collective]

Publishes a random model of 100 million parameters three times, and watches the engine's process meanwhile:
its private memory (Private_Clean and Private_Dirty in /proc/PID/smaps_rollup; the trainer's shared memory is
none of it) at its peak over all of them, minus what it was before the first.  The limit is the largest
bucket: 64 MiB, or the largest tensor.  With GRPO_CORE_VLLM_LAYERWISE=1 vLLM loads as it does on a GPU.
Prints one line per figure: name, value, limit, ok or above.  Needs Linux.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
from attrs import evolve

from grpo_core.contracts.records import EngineSetup, GenerationRequest, Weights
from grpo_core.demo.tiny import CHARACTERS, write_tokenizer
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.weights.layout import BUCKET
from grpo_core.weights.names import checkpoint_tensors
from grpo_core.weights.shm import SharedMemoryWriter
from grpo_plugin_scale.weights.collective import CollectiveWriter

MIB = 1 << 20
UPDATES = 3
SLACK = 16 * MIB
"""Memory that Python and the allocator take at the side: lists of names, stacks of threads."""


def make_model(directory: Path, layers: int) -> Any:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16384,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(directory)
    assert config.vocab_size > len(CHARACTERS)
    write_tokenizer(directory)
    return model


def private(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    fields = (row.split() for row in text.splitlines() if row.startswith("Private_"))
    return sum(int(field[1]) for field in fields) * 1024


class Watch:
    """Notes the largest private memory of a process while it is open."""

    def __init__(self, pid: int) -> None:
        self._pid, self._open = pid, True
        self.peak = private(pid)
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        while self._open:
            self.peak = max(self.peak, private(self._pid))
            time.sleep(0.001)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._open = False
        self._thread.join()


def limit(weights: Weights) -> float:
    sizes = [getattr(torch, info.dtype).itemsize * torch.Size(info.shape).numel() for info in weights.tensors]
    return (max(BUCKET, *sizes) + SLACK) / MIB


def line(name: str, value: float, limit: float | None = None) -> None:
    verdict = "" if limit is None else f"  limit {limit:.0f}  {'ok' if value <= limit else 'above'}"
    print(f"{name:<58} {value:>10.1f} MiB{verdict}", flush=True)


async def measure(kind: str, transport: str, model: Any, directory: Path) -> None:
    if kind == "vllm":
        from grpo_plugin_vllm.engine import VllmEngine

        make: Any = VllmEngine
        options: dict[str, Any] = {"device": "cpu", "cache_mib": 64, "max_rows": 16}
    else:
        make, options = LocalEngine, {"device": "cpu"}
    writer: Any = (
        SharedMemoryWriter() if transport == "shm" else CollectiveWriter(torch.device("cpu"), "127.0.0.1")
    )
    engine = make(EngineSetup(model=str(directory), log_directory=str(directory), deadline=300.0), **options)
    tensors = list(checkpoint_tensors(model).items())
    request = GenerationRequest(prompt_ids=(5, 6, 7), max_tokens=16)
    # the first weights come by shared memory, so that nothing of the transport is part of what was before
    first = SharedMemoryWriter()
    await engine.update_weights(first.write(0, tensors))
    await engine.generate([evolve(request, max_tokens=200)] * 8)  # touches all of vLLM's cache
    before, peak, seconds = private(engine.pid), 0, []
    for version in range(1, UPDATES + 1):
        weights = writer.write(version, [(name, tensor * (1 + version / 8)) for name, tensor in tensors])
        begin = time.perf_counter()
        with Watch(engine.pid) as watch:
            await engine.update_weights(weights)
        seconds.append(time.perf_counter() - begin)
        peak = max(peak, watch.peak)
        await engine.generate([request] * 8)
    name = f"{kind}, {transport}: peak during an update - before"
    line(name, (peak - before) / MIB, limit(weights))
    print(f"{kind + ', ' + transport + ': an update':<58} {min(seconds):>10.2f} s", flush=True)
    line(f"{kind}, {transport}: the process after it", private(engine.pid) / MIB)
    del first  # until now the engine's mapping of it was shared
    await engine.aclose()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("local", "vllm"))
    parser.add_argument("--transport", choices=("shm", "collective"))
    parser.add_argument("--layers", type=int, default=12)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = make_model(Path(directory), given.layers)
        print(f"{sum(parameter.numel() for parameter in model.parameters()):,} parameters")
        for dtype in (torch.float32, torch.bfloat16):
            sent = SharedMemoryWriter().write(0, checkpoint_tensors(model).items(), dtype=dtype)
            line(f"bytes of a sync, {str(dtype).removeprefix('torch.')}", sent.nbytes / MIB)
        for kind in [given.engine] if given.engine else ["local", "vllm"]:
            if kind == "vllm" and importlib.util.find_spec("vllm") is None:
                print("vLLM is not installed: make install-vllm")
                continue
            for transport in [given.transport] if given.transport else ["shm", "collective"]:
                asyncio.run(measure(kind, transport, model, Path(directory)))


if __name__ == "__main__":
    main()
