"""Memory of each rank of a trainer on a CPU, next to a trainer of one process.

    python tests/benchmarks/bench_ranks.py [RANKS ...]

Trains a random model of 41 million parameters for two steps.  Counted are the bytes of all tensors that
live then (weights and moments of AdamW; gradients, which are as large as the weights, have gone), with a
limit of 1 / ranks of one process's and 10%; and the private memory of the process (/proc/PID/smaps_rollup)
as it is, and after freed memory was given back to the system.  Needs Linux.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing
from bench_update_memory import MIB, make_model, private

from grpo_core.config import ModelConfig, TrainerConfig
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.records import Batch, Row
from grpo_core.contracts.tokens import Tokens
from grpo_core.training.plan import shares
from grpo_plugin_scale.training.trainer import create

sys.path.insert(0, str(Path(__file__).parents[1]))
from scaled import scaled

LAYERS, STEPS = 4, 2


def living() -> int:
    """Bytes of the memory of all tensors of this process."""
    gc.collect()
    sizes: dict[int, int] = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor):  # isinstance() would ask objects that are deprecated
            here: Any = thing.to_local() if hasattr(thing, "to_local") else thing
            storage = here.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


def trained(rank: int, ranks: int, model: str, meeting: str, found: Any) -> None:
    """Train as one rank; note what lives, what the process holds, and what of it is in use."""
    trainer = create(
        TrainerSetup(
            model=ModelConfig(path=model),
            trainer=TrainerConfig(device="cpu", threads=1, lr=1e-6),
            sections=scaled(ranks=ranks),
            async_save=False,
            rank=rank,
            ranks=ranks,
            rendezvous=meeting,
        )
    )
    chance = random.Random(0)

    def ids() -> list[int]:
        return chance.choices(range(3, 16_000), k=8)

    batch = tuple(
        Row(
            prompt_ids=tuple(ids()),
            tokens=Tokens.generated(ids(), (-1.0,) * 8, (0,) * 8),
            advantage=1.0 if i % 2 else -1.0,
            group=0,
        )
        for i in range(8)
    )
    for step in range(STEPS):
        given = Batch(step=step, rows=batch, temperature=1.0)
        trainer.train(shares(given, updates=1, ranks=ranks)[rank])
    alive, held = living(), private(os.getpid())
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    found.put((alive, held, private(os.getpid())))


def measured(ranks: int, model: Path) -> tuple[int, int, int]:
    """The largest figures of all ranks."""
    found = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as meeting:
        given = (ranks, str(model), f"{meeting}/rendezvous", found)
        torch.multiprocessing.spawn(trained, args=given, nprocs=ranks)
    alive, held, used = zip(*(found.get() for _ in range(ranks)), strict=True)
    return max(alive), max(held), max(used)


def main(several: list[int]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        model = make_model(Path(scratch), LAYERS)
        print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.0f} million parameters")
        whole = 0
        for ranks in (1, *several):
            alive, held, used = measured(ranks, Path(scratch))
            whole = whole or alive
            limit = 1.1 / ranks if ranks > 1 else 1.0
            verdict = "ok" if alive / whole <= limit else "above"
            print(
                f"{ranks} ranks: tensors {alive / MIB:.0f} MiB, {alive / whole:.3f} of one process's  "
                f"limit {limit:.3f}  {verdict}; process {held / MIB:.0f} MiB, {used / MIB:.0f} MiB in use",
                flush=True,
            )


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]] or [2, 4])
