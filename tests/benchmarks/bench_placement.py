"""Where engine and trainer live: two threads of one process, or a process each?

The demo's step (512 rows) is trained again and again, alone; while the demo's groups are decoded in another
thread; and while they are decoded in another process.  A slowdown of 1 means that both run for real beside
each other; 2, that they take turns.  This is why grpo-core gives each a process of its own.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from grpo_core.config import ModelConfig, TrainerConfig
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.records import Batch, GenerationRequest, Row
from grpo_core.contracts.tokens import Tokens
from grpo_core.demo.tiny import encode, make_tiny_model
from grpo_core.engines.local.decoder import Decoder
from grpo_core.engines.local.llama import Llama, Shape
from grpo_core.training.trainer import TorchTrainer
from grpo_core.weights.layout import load_tensors

STEPS = 15


def exercises(n: int) -> list[tuple[str, str]]:
    chance = random.Random(0)
    digits = ["".join(chance.choices("0123456789", k=5)) for _ in range(n)]
    return [(f"{d}=", "".join(sorted(d))) for d in digits]


def rows() -> tuple[Row, ...]:
    def row(prompt: str, reply: str, group: int, advantage: float) -> Row:
        ids = (*encode(reply), 1)
        n = len(ids)
        return Row(
            prompt_ids=encode(prompt),
            tokens=Tokens.generated(ids, (-0.5,) * n, (0,) * n),
            advantage=advantage,
            group=group,
        )

    return tuple(
        row(prompt, reply, group, 1.0 if i % 2 else -1.0)
        for group, (prompt, reply) in enumerate(exercises(64))
        for i in range(8)
    )


def decode(directory: Path, until: Callable[[], bool], count: Callable[[], None]) -> None:
    """Decode the demo's groups until told to stop."""
    shape = Shape.of(json.loads((directory / "config.json").read_text()))
    assert shape is not None
    decoder = Decoder(Llama(shape, device=torch.device("cpu"), dtype=torch.float32))
    decoder.load(dict(load_tensors(directory)), 0)
    requests = [
        GenerationRequest(prompt_ids=encode(prompt), max_tokens=16, stop_token_ids=(1,), seed=8 * g + i)
        for g, (prompt, _) in enumerate(exercises(64))
        for i in range(8)
    ]
    while not until():
        decoder.add(enumerate(requests))
        while decoder.busy:
            decoder.step()
        count()


def in_process(directory: str, stop, done) -> None:  # type: ignore[no-untyped-def]
    torch.set_num_threads(1)

    def count() -> None:
        done.value += 1

    decode(Path(directory), stop.is_set, count)


def timed(trainer: TorchTrainer, given: tuple[Row, ...]) -> float:
    seconds = []
    for _ in range(STEPS):
        begun = time.perf_counter()
        trainer.step(Batch(step=trainer.version, rows=given, temperature=1.0))
        seconds.append(time.perf_counter() - begun)
    return median(seconds)


def main() -> None:
    torch.set_num_threads(1)
    given = rows()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch) / "model"
        make_tiny_model(directory, exercises(200), warm_start_steps=5)
        config = TrainerConfig(updates_per_step=4, threads=1, lr=1e-6)
        trainer = TorchTrainer(TrainerSetup(model=ModelConfig(path=str(directory)), trainer=config))
        timed(trainer, given)
        alone = timed(trainer, given)

        stop, batches = threading.Event(), [0]

        def count() -> None:
            batches[0] += 1

        with_thread_at = time.perf_counter()
        thread = threading.Thread(target=decode, args=(directory, stop.is_set, count))
        thread.start()
        beside_thread = timed(trainer, given)
        stop.set()
        thread.join()
        thread_rate = batches[0] / (time.perf_counter() - with_thread_at)

        spawn = multiprocessing.get_context("spawn")
        done, ending = spawn.Value("i", 0), spawn.Event()
        process = spawn.Process(target=in_process, args=(str(directory), ending, done))
        process.start()
        while done.value == 0:
            time.sleep(0.01)
        before, begun = done.value, time.perf_counter()
        beside_process = timed(trainer, given)
        process_rate = (done.value - before) / (time.perf_counter() - begun)
        ending.set()
        process.join()
    show("training step alone (s)", alone)
    show("training slowed by decoding in a thread (x)", beside_thread / alone)
    show("training slowed by decoding in a process (x)", beside_process / alone, 1.25)
    show("decoding in a thread / in a process, batches per second (x)", thread_rate / process_rate)


def show(name: str, value: float, limit: float | None = None) -> None:
    feedback = "" if limit is None else f"<= {limit:g}  {'ok' if value <= limit else 'short'}"
    print(f"{name:60} {value:10.3f}  {feedback}", flush=True)


if __name__ == "__main__":
    main()
