"""An engine, a trainer and an environment that sleep for as long as others compute: service times are known.

The engine takes one decoding step after the other; each gives every running row a token and lasts ``token +
row * (rows - 1)`` seconds, times a random factor.  The trainer's seconds depend on its rows, times another.
"""

from __future__ import annotations

import asyncio
import math
import random
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

import grpo_core as grpo
from grpo_core.contracts.records import Batch, Completion, EngineSetup, GenerationRequest, StepResult, Weights
from grpo_core.weights.layout import load_tensors
from grpo_core.weights.shm import SharedMemoryWriter

JITTER = 0.15
"""Standard deviation of the logarithm of each step's seconds."""


class SleepingEngine:
    """Lengths depend on the prompt, on the request's seed, and a little on the version."""

    def __init__(
        self, setup: EngineSetup, *, token: float = 0.02, row: float = 0.0007, mean: float = 20.0
    ) -> None:
        self._token, self._row, self._mean = token, row, mean
        self._rng = random.Random(setup.seed)
        self._rows: list[list] = []
        self._version, self._decoding = -1, None

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        rows: list[list] = [[self._length(request), [], asyncio.Event(), request] for request in requests]
        self._rows += rows
        if self._decoding is None:
            self._decoding = asyncio.create_task(self._decode())
        for row in rows:
            await row[2].wait()
        return [self._completion(row) for row in rows]

    async def _decode(self) -> None:
        while self._rows:
            seconds = self._token + self._row * (len(self._rows) - 1)
            await asyncio.sleep(seconds * self._rng.lognormvariate(0.0, JITTER))
            for row in self._rows:
                row[1].append(self._version)
                if len(row[1]) >= row[0]:
                    row[2].set()
            self._rows = [row for row in self._rows if not row[2].is_set()]
        self._decoding = None

    def _length(self, request: GenerationRequest) -> int:
        prompt = random.Random(zlib.crc32(request.prompt_ids.tobytes())).lognormvariate(-0.08, 0.4)
        own = random.Random(request.seed).lognormvariate(-0.125, 0.5)
        return max(1, min(request.max_tokens, round(self._mean * prompt * own)))

    def _completion(self, row: list) -> Completion:
        length, versions, _, request = row
        rng = random.Random(request.seed)
        cut = length >= request.max_tokens
        return Completion(
            token_ids=[rng.randrange(4, 20) for _ in range(length)],
            logprobs=[-1.0] * length,
            versions=versions,
            finish_reason="length" if cut else "stop",
        )

    async def update_weights(self, weights: Weights) -> None:
        await asyncio.sleep(0.05)
        self._version = weights.version

    async def aclose(self) -> None:
        if self._decoding is not None:
            self._decoding.cancel()


class SleepingTrainer(grpo.Trainer):
    """Saves a copy of the model that the run started from."""

    def __init__(self, setup: grpo.TrainerSetup, *, step: float = 0.2, token: float = 0.001) -> None:
        self._setup, self._step, self._token, self._version = setup, step, token, 0
        self._rng = random.Random(setup.seed)
        self._writer = SharedMemoryWriter()

    async def started(self) -> None:
        if self._setup.prepare is not None:
            await asyncio.to_thread(self._setup.prepare)
        self._tensors = load_tensors(Path(self._setup.model.path))

    async def step(self, batch: Batch) -> StepResult:
        tokens = sum(len(row.prompt_ids) + len(row.tokens) for row in batch.rows)
        seconds = (self._step + self._token * tokens) * self._rng.lognormvariate(0.0, JITTER)
        await asyncio.sleep(seconds)
        self._version += 1
        return StepResult(version=self._version, metrics={"loss": 0.0, "time/train": seconds})

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        await asyncio.sleep(0.03)
        return self._writer.write(self._version, self._tensors)

    async def save(self, directory: Path):
        async def written() -> None:
            await asyncio.to_thread(shutil.copytree, self._setup.model.path, directory / "trainer")

        return written


class Guessing(grpo.Environment):
    """Half of all replies are right; a judgement takes 0.1 s."""

    def prompts(self, split: str):
        return [grpo.Prompt(messages=f"{split} {i}", id=f"{split} {i}") for i in range(2000)]

    async def evaluate(self, episodes):
        await asyncio.sleep(0.1)
        return [float(zlib.crc32(repr(each.messages).encode()) % 2) for each in episodes]


def share(values: Sequence[float], at: float) -> float:
    """Return the value below which this share of the values is."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(at * len(ordered)) - 1)]
