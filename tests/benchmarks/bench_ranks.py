"""Memory of each rank of a trainer, next to a trainer of one process.

    python tests/benchmarks/bench_ranks.py [RANKS ...]

Trains a random model of 40 million parameters for two steps and reads the private memory of each process
(/proc/PID/smaps_rollup) after it, minus that of a trainer of a tiny model: weights, gradients and the
optimizer.  The limit is 1 / ranks of one process's, and 10%.  Needs Linux.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
from pathlib import Path

from bench_trainer import rows
from bench_update_memory import MIB, make_model, private

from grpo_core.config import ModelConfig, TrainerConfig
from grpo_core.demo.tiny import make_tiny_model
from grpo_core.records import Batch
from grpo_core.training.process import ProcessTrainer
from grpo_core.training.setup import TrainerSetup

LAYERS = 4


async def memory(model: Path, ranks: int, vocabulary: int) -> list[int]:
    """Private bytes of each rank after two steps."""
    config = TrainerConfig(ranks=ranks, device="cpu", threads=1, lr=1e-6)
    trainer = ProcessTrainer(
        TrainerSetup(model=ModelConfig(path=str(model)), trainer=config, async_save=False)
    )
    try:
        await trainer.started()
        given = rows([8] * 8, prompt=8, vocabulary=vocabulary)
        for step in range(2):
            await trainer.step(Batch(step=step, rows=given, temperature=1.0))
        return [private(child.pid) for child in trainer.children]
    finally:
        await trainer.aclose()


async def main(several: list[int]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        tiny, large = Path(scratch) / "tiny", Path(scratch) / "large"
        make_tiny_model(tiny, (), warm_start_steps=0)
        model = make_model(large, LAYERS)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        random.seed(0)
        (base,) = await memory(tiny, 1, 90)
        (alone,) = await memory(large, 1, 16_000)
        whole = alone - base
        print(f"{parameters / 1e6:.0f} million parameters; 16 bytes of each: {16 * parameters / MIB:.0f} MiB")
        print(f"one process: {whole / MIB:.0f} MiB above a tiny model's {base / MIB:.0f} MiB", flush=True)
        for ranks in several:
            bases = await memory(tiny, ranks, 90)
            found = await memory(large, ranks, 16_000)
            most = max(here - its for here, its in zip(found, bases, strict=True))
            share, limit = most / whole, 1.1 / ranks
            verdict = "ok" if share <= limit else "above"
            print(
                f"{ranks} ranks: {most / MIB:.0f} MiB each at most, {share:.3f} of one  limit {limit:.3f}  "
                f"{verdict}",
                flush=True,
            )


if __name__ == "__main__":
    asyncio.run(main([int(text) for text in sys.argv[1:]] or [2, 4]))
