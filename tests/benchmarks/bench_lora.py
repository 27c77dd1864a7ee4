"""A weight sync of adapters next to one of all weights, on models of 100 million parameters.

    python tests/benchmarks/bench_lora.py

Publishes two random models as the trainer does, whole and as adapters of rank 16, to the engine ``local`` on
the CPU.  Prints the bytes of a sync as a share of the whole model's, the largest difference of logprobs that
the canary finds after it, and the seconds of publishing and taking a version, whole and as adapters.  The
limits are 2% and 1e-5.  The share depends on the model: adapters grow with the layers, and a vocabulary
counts in the whole model alone.  Then it loads the second model from bfloat16, as a trainer of adapters with
products in bfloat16 does, and compares its private memory with the bytes of its tensors; the limit is 1.1
after loading, and for the peak 1.1 of all in float32 and what a process keeps free.  Needs Linux.
Prints one line per figure: name, value, limit, ok or above.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import sys
import tempfile
import threading
import time
from multiprocessing.queues import Queue
from pathlib import Path

import torch
import transformers
from adapting import with_lora
from attrs import evolve

from grpo_core.config import LossConfig, ModelConfig, TrainerConfig
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.records import EngineSetup
from grpo_core.demo.tiny import write_tokenizer
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.loop import canary
from grpo_core.loop.agreement import Tolerance
from grpo_core.processes import cpu
from grpo_core.training.trainer import TorchTrainer
from grpo_plugin_scale.lora import LoraConfig

RANK, UPDATES = 16, 3
SHARE, DIFFERENCE = 2.0, 1e-5
"""Limits: per cent of the whole model's bytes, and difference of logprobs."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES: dict[str, list[tuple[str, list[str], float | None]]] = {
    "qwen3": [("all linear layers", [], SHARE), ("attention", ATTENTION, SHARE)],
    "llama": [("all linear layers", [], None), ("attention", ATTENTION, SHARE)],
}
PROMPTS = [tuple(range(5 + i, 37 + i)) for i in range(4)]
above = []


def make_model(directory: Path, kind: str) -> str:
    common = {"max_position_embeddings": 256, "tie_word_embeddings": True}
    config = {
        "qwen3": lambda: transformers.Qwen3Config(
            vocab_size=151_936, hidden_size=512, intermediate_size=1536, num_hidden_layers=8,
            num_attention_heads=8, num_key_value_heads=4, head_dim=64, **common,
        ),
        "llama": lambda: transformers.LlamaConfig(
            vocab_size=16_384, hidden_size=768, intermediate_size=2048, num_hidden_layers=12,
            num_attention_heads=12, num_key_value_heads=12, **common,
        ),
    }[kind]()  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(directory / kind)
    write_tokenizer(directory / kind)
    return str(directory / kind)


def line(name: str, value: float, unit: str, limit: float | None = None) -> None:
    verdict = "" if limit is None else f"  limit {limit:g}  {'ok' if value <= limit else 'above'}"
    above.extend([name] if limit is not None and value > limit else [])
    print(f"{name:<66} {value:>10.3g} {unit}{verdict}", flush=True)


async def sync(path: str, lora: LoraConfig | None) -> tuple[int, float, float]:
    """Return the bytes of a sync, the seconds of a later one, and the canary's largest difference."""
    setup = TrainerSetup(
        model=ModelConfig(path=path),
        trainer=TrainerConfig(device="cpu", threads=1),
        loss=LossConfig(),
        plugins=(),
    )
    trainer = TorchTrainer(with_lora(setup, lora))
    engine = LocalEngine(EngineSetup(model=path, log_directory=path, deadline=300.0), device="cpu")
    seconds, differences = [], []
    for version in range(UPDATES):
        for name, parameter in trainer.model.trainable():
            if lora is not None and ".lora_B." in name:
                torch.nn.init.normal_(parameter, std=0.02)
        begun = time.perf_counter()
        weights = evolve(trainer.publish(), version=version)
        await engine.update_weights(weights)
        seconds.append(time.perf_counter() - begun)
        weights = evolve(weights, canary=trainer.model.next_tokens(PROMPTS))
        found = await canary.verify(engine, weights, tolerance=Tolerance(1.0), deadline=None)
        differences.append(found.largest)
    await engine.aclose()
    return weights.nbytes, statistics.median(seconds[1:]), max(differences)


def anonymous() -> int:
    """Return the bytes of this process's memory that are in no file."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


def loaded(small: str, path: str, told: Queue[tuple[int, int, int, int]]) -> None:
    """Load a trainer of adapters; tell its memory, the peak, the bytes of its tensors, and as float32."""
    cpu.prepare(1)
    adapted(small)  # imports what the next one needs
    before, peak, ended = anonymous(), [0], threading.Event()

    def watch() -> None:
        while not ended.wait(0.002):
            peak[0] = max(peak[0], anonymous())

    threading.Thread(target=watch, daemon=True).start()
    trainer = adapted(path)
    after = anonymous()
    ended.set()
    tensors = list(trainer.model.weights())
    nbytes, whole = (sum(map(size, tensors)) for size in (lambda t: t.nbytes, lambda t: 4 * t.numel()))
    told.put((after - before, peak[0] - before, nbytes, whole))


def adapted(path: str) -> TorchTrainer:
    model = ModelConfig(path=path, dtype="bfloat16")
    setup = TrainerSetup(model=model, trainer=TrainerConfig(device="cpu", threads=1))
    return TorchTrainer(with_lora(setup, LoraConfig(rank=RANK)))


def memory(path: str) -> None:
    """Print the memory of a trainer of adapters in a separate process."""
    directory, small = Path(path).with_name("bfloat16"), Path(path).with_name("small")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    tiny = transformers.LlamaConfig(
        vocab_size=128, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4
    )
    transformers.AutoModelForCausalLM.from_config(tiny, dtype=torch.bfloat16).save_pretrained(small)
    write_tokenizer(small)
    spawn = multiprocessing.get_context("spawn")
    told: Queue[tuple[int, int, int, int]] = spawn.Queue()
    process = spawn.Process(target=loaded, args=(str(small), str(directory), told))
    process.start()
    after, peak, nbytes, whole = told.get(timeout=120)
    process.join()
    line(f"memory of a trainer of adapters / its tensors' {nbytes >> 20} MiB", after / nbytes, "", 1.1)
    most = whole + cpu.KEPT_FREE
    line(f"peak while it is loaded / {most >> 20} MiB", peak / most, "", 1.1)


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for kind, chosen in CASES.items():
            path = make_model(Path(scratch), kind)
            nbytes, whole, difference = asyncio.run(sync(path, None))
            print(f"{kind}, {nbytes / 4e6:.1f} million parameters, {nbytes / 1e6:.1f} MB a sync")
            line(f"{kind}, all weights: difference of logprobs", difference, "", DIFFERENCE)
            for name, targets, limit in chosen:
                lora = LoraConfig(rank=RANK, targets=targets)
                sent, seconds, difference = asyncio.run(sync(path, lora))
                line(f"{kind}, {name}: bytes of a sync", 100 * sent / nbytes, "%", limit)
                line(f"{kind}, {name}: difference of logprobs", difference, "", DIFFERENCE)
                line(f"{kind}, {name}: seconds of a sync, of all weights' = 1", seconds / whole, "")
        memory(path)


if __name__ == "__main__":
    main()
    sys.exit(bool(above))
