"""How long a checkpoint holds training up, in copies of what it holds.

Training waits for the cut, in which nothing is copied.  Weights and optimizer are written while the next step
computes its gradient, and its update waits for the rest, which is not measured here.  The yardstick is a copy
in memory of the same bytes into memory that was touched before: weights and both moments of AdamW.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from grpo_core.config import ModelConfig, TrainerConfig
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.records import Batch, Row
from grpo_core.contracts.tokens import Tokens
from grpo_core.demo import tiny
from grpo_core.loop import checkpoint
from grpo_core.training.trainer import TorchTrainer, create

REPEATS = 9
LIMIT = 1.2


def main() -> int:
    with tempfile.TemporaryDirectory() as small, tempfile.TemporaryDirectory() as large:
        measure(Path(small), 64, 2)
        return 0 if measure(Path(large), 512, 8) <= LIMIT else 1


def measure(scratch: Path, width: int, layers: int) -> float:
    """Prints a model's figures; returns what training waited, in copies."""
    tiny.make_tiny_model(scratch / "model", (), width=width, layers=layers, warm_start_steps=0)
    trainer = create(
        TrainerSetup(model=ModelConfig(path=str(scratch / "model")), trainer=TrainerConfig(), plugins=())
    )
    row = Row(
        prompt_ids=(5, 6), tokens=Tokens.generated((7, 8), (-4.0, -4.0), (0, 0)), advantage=1.0, group=0
    )
    trainer.step(Batch(step=0, rows=(row,), temperature=1.0))
    state = [t.detach() for _, p in trainer._named for t in (p, *trainer.optimizers.state(p).values())]
    size = sum(tensor.nbytes for tensor in state)
    copies = [torch.zeros_like(tensor) for tensor in state]

    def copy() -> None:
        for there, here in zip(copies, state, strict=True):
            there.copy_(here)

    saved = [asyncio.run(save(trainer, scratch / "checkpoints")) for _ in range(REPEATS)]
    memcpy = median(seconds(copy) for _ in range(REPEATS))
    (first, _), *others = saved
    blocked, whole = (median(part) for part in zip(*others, strict=True))
    print(f"{f'a checkpoint of {size / 1e6:.0f} MB, until it is complete (s)':60} {whole:10.3f}")
    print(f"{'  training waits for it (s)':60} {blocked:10.4f}  (the first one: {first:.4f})")
    ratio = blocked / memcpy
    feedback = f"<= {LIMIT:g}  {'ok' if ratio <= LIMIT else 'short'}" if size > 100e6 else ""
    print(f"{'  in copies of its bytes in memory':60} {ratio:10.2f}  {feedback}", flush=True)
    return ratio


async def save(trainer: TorchTrainer, parent: Path) -> tuple[float, float]:
    """Seconds that training waits, and seconds until the checkpoint is complete."""

    async def copied(directory: Path) -> Callable[[], asyncio.Future[None]]:
        trainer.save(directory)
        return lambda: asyncio.wrap_future(trainer.written())

    began = time.perf_counter()
    finish = await checkpoint.begin(parent, step=1, pipeline={}, loaders={}, save_trainer=copied, keep=1)
    blocked = time.perf_counter() - began
    await finish()
    return blocked, time.perf_counter() - began


def seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    sys.exit(main())
