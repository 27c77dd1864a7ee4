"""Memory and time of a step with ``trainer.weights`` "float32" and "bfloat16", as bytes of a parameter.

    python tests/benchmarks/bench_weights.py [--layers 24] [--rows 4] [--length 8]

Each variant trains a random model in a process of its own, on one thread.  It tells what its weights and
its optimizer take, by how much the memory that torch allocates grows in a step, and its fastest step.  The
variants run in turns, twice; the smallest figures count.  With few and short rows, what is left are weights,
gradients, the optimizer, and the copies that passes make of weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

VARIANTS = {
    "float32, products in float32": {"weights": "float32", "dtype": "float32"},
    "float32 (autocast)": {"weights": "float32"},
    "bfloat16": {"weights": "bfloat16"},
}


def make_model(directory: Path, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from grpo_core.demo.tiny import write_tokenizer

    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=1408, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=512, tie_word_embeddings=True,
        pad_token_id=0, bos_token_id=None, eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory)


def growth(work: Callable[[], object]) -> int:
    """Return by how many bytes of allocated memory something grows at its peak."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        work()
    assert found.profiler is not None
    events = [each for each in found.profiler.kineto_results.events() if each.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return int(peak)


def here(tensor: Any) -> int:
    """Return the bytes of a tensor, or of the part that this rank has."""
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return int(part.nbytes)


def measure(given: argparse.Namespace, options: dict[str, str]) -> dict[str, float]:
    import numpy as np

    from grpo_core.config import ModelConfig, TrainerConfig
    from grpo_core.config.run import TrainerSetup
    from grpo_core.contracts.records import Batch, Row
    from grpo_core.contracts.tokens import Tokens
    from grpo_plugin_scale.training.trainer import create

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from scaled import scaled

    length = given.length
    trainer = create(
        TrainerSetup(
            model=ModelConfig(path=given.model, dtype=options.get("dtype", "bfloat16")),
            trainer=TrainerConfig(threads=1, device="cpu", tokens_per_microbatch=given.microbatch),
            sections=scaled(weights=options["weights"]),
            plugins=(),
        )
    )
    ids = np.random.default_rng(0).integers(3, 98, (given.rows, 2 * length))
    rows = tuple(
        Row(
            prompt_ids=tuple(map(int, each[:length])),
            tokens=Tokens.generated(each[length:].tolist(), (-4.0,) * length, (0,) * length),
            advantage=1.0 - i % 2 * 2,
            group=i // 2,
        )
        for i, each in enumerate(ids)
    )
    batches = [Batch(step=step, rows=rows, temperature=1.0) for step in range(given.steps + 2)]
    trainer.step(batches[0])
    more = growth(lambda: trainer.step(batches[1]))
    seconds = []
    for batch in batches[2:]:
        began = time.perf_counter()
        trainer.step(batch)
        seconds.append(time.perf_counter() - began)
    rest = sum(map(here, [*trainer.model.weights(), *trainer.optimizers.tensors()]))
    n = trainer.model.parameters
    return {"rest": rest / n, "peak": (rest + more) / n, "seconds": min(seconds), "parameters": n}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=8)
    parser.add_argument("--microbatch", type=int, default=8192, help="tokens")
    parser.add_argument("--one", help="a variant to measure in this process")
    parser.add_argument("--model")
    given = parser.parse_args()
    if given.one:
        found = measure(given, VARIANTS[given.one])
        print(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), given.layers)
        best: dict[str, dict[str, float]] = {}
        for name in [*VARIANTS] * 2:
            command = [sys.executable, __file__, "--one", name, "--model", directory]
            options = [f"--{key}={getattr(given, key)}" for key in ("steps", "rows", "length", "microbatch")]
            told = subprocess.run([*command, *options], capture_output=True, text=True, check=True).stdout
            found = json.loads(told.splitlines()[-1])
            best[name] = {key: min(value, best.get(name, found)[key]) for key, value in found.items()}
    first = next(iter(best.values()))
    print(f"{first['parameters'] / 1e6:.0f}M parameters, {given.rows} rows of {2 * given.length} tokens")
    for name, found in best.items():
        ratio = found["seconds"] / first["seconds"]
        bytes_of = f"peak {found['peak']:5.1f}  rest {found['rest']:5.1f} bytes a parameter"
        print(f"{name:32s} {bytes_of}, step {ratio:.2f}")


if __name__ == "__main__":
    main()
