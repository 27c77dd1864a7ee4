"""The cost of running environments in separate processes.

Batches of 64 episodes are judged by an environment here, and by the same one in its process, in turn; the
throughputs are compared pair by pair.  Once with answers that math-verify has to compare, as those of a model
are, and once with an environment that does next to nothing, to see what the process adds.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from bare import bare_venv

from grpo_core.app.sourced import SourcedProcess
from grpo_core.config import EnvironmentConfig, TaskConfig
from grpo_core.contracts.records import Episode, Prompt
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_plugin_math.exercises import sort
from grpo_plugin_math.gsm8k import GSM8K

BATCH = 64
PAIRS = 40


def rows(n: int) -> list[dict[str, str]]:
    chance = random.Random(0)
    numbers = [chance.randrange(2, 10_000) for _ in range(n)]
    return [{"question": f"What is half of {2 * i + 1}?", "answer": f"It is #### {i}.5"} for i in numbers]


def reply(prompt: Prompt, chance: random.Random) -> str:
    """Some sentences, and an answer that is right every other time, as a fraction that has to be computed."""
    halves = round(2 * float(prompt.answer)) + 2 * chance.randrange(2)
    words = " ".join(chance.choices(["so", "that", "half", "makes", "we", "take", "of", "it"], k=150))
    return f"{words}. \\boxed{{\\frac{{{halves}}}{{2}}}}"


def episodes(prompts: Sequence[Prompt], chance: random.Random, say: Callable[..., str]) -> list[Episode]:
    return [
        Episode(
            prompt=prompt,
            messages=(*prompt.messages, {"role": "assistant", "content": say(prompt, chance)}),
            group=prompt.id,
        )
        for prompt in chance.choices(prompts, k=BATCH)
    ]


async def compared(
    here: Any, there: EnvironmentProcess, say: Callable[..., str]
) -> tuple[float, float, float]:
    """Throughput there / here, as the median of pairs; and the seconds of a batch here and there."""
    prompts = await there.prompts("train")
    chance = random.Random(1)

    async def timed(judge: Callable[[list[Episode]], Awaitable[Any]], batch: list[Episode]) -> float:
        begin = time.perf_counter()
        await judge(batch)
        return time.perf_counter() - begin

    async def direct(batch: list[Episode]) -> Any:
        result = here.evaluate(batch)
        return await result if inspect.isawaitable(result) else result

    pairs = []
    for place in range(PAIRS + 2):
        batch = episodes(prompts, chance, say)
        order = (direct, there.evaluate) if place % 2 else (there.evaluate, direct)
        seconds = {judge: await timed(judge, batch) for judge in order}
        pairs.append((seconds[direct], seconds[there.evaluate]))
    pairs = pairs[2:]  # the first of each warm up
    return median(a / b for a, b in pairs), median(a for a, _ in pairs), median(b for _, b in pairs)


async def measure() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows(2000))))
        cases = [
            ("math-verify", GSM8K(), "math:gsm8k", str(path), reply),
            ("string comparison", sort(), "math:sort", "", lambda prompt, _: str(prompt.answer)),
        ]
        for name, here, spec, data, say in cases:
            there = SourcedProcess(
                EnvironmentSpec(task="bench", env=spec), data=TaskConfig(env=spec, data=data)
            )
            try:
                ratio, direct, child = await compared(here, there, say)
            finally:
                await there.aclose()
            show(
                f"{name}: throughput through the process / direct",
                ratio,
                0.9 if here is cases[0][1] else None,
            )
            show(f"{name}: what the process adds to an episode (us)", (child - direct) / BATCH * 1e6)


COPYING = """
import grpo_core as grpo

class Copying(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages=str(i), answer=str(i)) for i in range(2000)]

    def evaluate(self, episodes):
        return [float(e.reply == e.prompt.answer) for e in episodes]
"""


async def measure_interpreter() -> None:
    """Compare an environment in a bare virtual environment of this Python with the same one in ours."""
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "copying.py"
        file.write_text(COPYING)
        bare_venv(Path(scratch) / "bare")
        python = str(Path(scratch) / "bare")
        here = EnvironmentProcess(EnvironmentSpec(task="here", env=f"{file}:Copying"))
        config = EnvironmentConfig(python=python)
        there = EnvironmentProcess(EnvironmentSpec(task="there", env=f"{file}:Copying", config=config))
        try:
            ratio, _, _ = await compared(here, there, lambda prompt, _: str(prompt.answer))
        finally:
            await asyncio.gather(here.aclose(), there.aclose())
        show("another virtual environment: throughput / that of our own", ratio, 0.95)


def show(name: str, value: float, limit: float | None = None) -> None:
    feedback = "" if limit is None else f">= {limit:g}  {'ok' if value >= limit else 'short'}"
    print(f"{name:60} {value:10.3f}  {feedback}", flush=True)


if __name__ == "__main__":
    asyncio.run(measure())
    asyncio.run(measure_interpreter())
