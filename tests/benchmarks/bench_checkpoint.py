"""How long a checkpoint holds training up, in copies of what it holds.

Training waits from the cut until the checkpoint is complete on disk: serialised, its files hashed and
synced.  The yardstick is a copy in memory of the same bytes: weights and both moments of AdamW.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from grpo_core import checkpoint, tiny
from grpo_core.config import ModelConfig, TrainerConfig
from grpo_core.records import Batch, Row
from grpo_core.trainer import TorchTrainer
from grpo_core.trainer_process import TrainerSetup

REPEATS = 5


def main() -> None:
    for width, layers in ((64, 2), (512, 8)):
        with tempfile.TemporaryDirectory() as scratch:
            measure(Path(scratch), width, layers)


def measure(scratch: Path, width: int, layers: int) -> None:
    tiny.make_tiny_model(scratch / "model", (), width=width, layers=layers, warm_start_steps=0)
    trainer = TorchTrainer(
        TrainerSetup(model=ModelConfig(path=str(scratch / "model")), trainer=TrainerConfig(), plugins=())
    )
    row = Row(prompt_ids=(5, 6), token_ids=(7, 8), sampled=(True, True), logprobs=(-4.0, -4.0),
              versions=(0, 0), advantage=1.0, group=0)  # fmt: skip
    trainer.step(Batch(step=0, rows=(row,), temperature=1.0))
    state = [t.detach() for _, p in trainer._named for t in (p, *trainer._optimizer.state[p].values())]
    size = sum(tensor.nbytes for tensor in state)
    copies = [torch.empty_like(tensor) for tensor in state]

    async def save(directory: Path) -> None:
        trainer.save(directory)

    def write() -> None:
        asyncio.run(
            checkpoint.write(
                scratch / "checkpoints", step=1, pipeline={}, loaders={}, save_trainer=save, keep=1
            )
        )

    def copy() -> None:
        for there, here in zip(copies, state, strict=True):
            there.copy_(here)

    blocked, memcpy = seconds(write), seconds(copy)
    print(f"{f'training blocked by a checkpoint of {size / 1e6:.0f} MB (s)':60} {blocked:10.3f}")
    print(f"{'  in copies of its bytes in memory':60} {blocked / memcpy:10.1f}")


def seconds(work: Callable[[], None]) -> float:
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        work()
        took.append(time.perf_counter() - began)
    return median(took)


if __name__ == "__main__":
    main()
