"""How long a judge that waits for a network holds up a step.

    python tests/benchmarks/bench_judges.py [STEPS]

A step judges 128 rollouts through the real process and its pool, with the rollouts of a group together as in
training.  The ideal is one semaphore over the same calls, in the same run.

    flat    one call of 0.5 s for each rollout, 8 at once
    tail    four turns, 95% of the calls take 0.05 s and 5% take 1.5 s, 16 at once
    calls   a call that takes no time: what the process adds to it

The judge sleeps and computes nothing, so the ratios hardly depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import time

from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.protocols import Environment
from grpo_core.contracts.records import Episode, Feedback, Prompt
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec
from grpo_core.plugins.installed import PluginSelection

ROLLOUTS, GROUP = 128, 8
SLOW, FAST, SHARE = 1.5, 0.05, 0.05


class Judge(Environment):
    """Waits as long as the last message says."""

    def __init__(self, turns: int = 1) -> None:
        self.max_turns = turns

    def prompts(self, split: str) -> list[Prompt]:
        return [Prompt(messages="?")]

    async def evaluate(self, episodes: list[Episode]) -> list[Feedback]:
        (episode,) = episodes
        await asyncio.sleep(float(episode.reply))
        last = episode.turn + 1 == self.max_turns
        return [Feedback(reward=1.0) if last else Feedback(done=False, messages="go on")]


def episode(seconds: float, turn: int, group: int) -> Episode:
    said = {"role": "assistant", "content": str(seconds)}
    return Episode(prompt=Prompt(messages="?"), messages=(said,), turn=turn, group=str(group))


async def rollouts(pool: EnvironmentPool, waits: list[list[float]]) -> None:
    """Judge a step: single turns as whole groups, several turns rollout by rollout."""

    async def play(number: int) -> None:
        for turn, seconds in enumerate(waits[number]):
            (feedback,) = await pool.evaluate([episode(seconds, turn, number // GROUP)])
            assert feedback.error is None, feedback.error

    async def group(first: int) -> None:
        some = [episode(waits[first + i][0], 0, first) for i in range(GROUP)]
        assert all(feedback.reward == 1.0 for feedback in await pool.evaluate(some))

    if len(waits[0]) == 1:
        await asyncio.gather(*(group(first) for first in range(0, len(waits), GROUP)))
    else:
        await asyncio.gather(*(play(number) for number in range(len(waits))))


async def ideal(waits: list[list[float]], concurrency: int) -> None:
    gate = asyncio.Semaphore(concurrency)

    async def play(some: list[float]) -> None:
        for seconds in some:
            async with gate:
                await asyncio.sleep(seconds)

    await asyncio.gather(*map(play, waits))


async def timed(awaitable) -> float:
    begin = time.perf_counter()
    await awaitable
    return time.perf_counter() - begin


async def compare(name: str, steps: list[list[list[float]]], concurrency: int, limit: float | None) -> None:
    """Print the seconds of a step, and their ratio to the ideal, summed over the steps."""
    config = EnvironmentConfig(concurrency=concurrency)
    spec = EnvironmentSpec(
        task="bench", env=f"{__file__}:Judge", options={"turns": len(steps[0][0])}, config=config
    )
    process = EnvironmentProcess(spec, plugins=PluginSelection(allow=()))
    pool = EnvironmentPool([process], config)
    await pool.start()
    try:
        await rollouts(pool, [[0.0] * len(steps[0][0])] * GROUP)  # warms up
        real = [await timed(rollouts(pool, waits)) for waits in steps]
    finally:
        await pool.aclose()
    best = [await timed(ideal(waits, concurrency)) for waits in steps]
    calls = sum(len(some) for waits in steps for some in waits)
    show(f"{name}: seconds of a step", sum(real) / len(steps))
    if limit is not None:
        show(f"{name}: seconds of a step, ideal", sum(best) / len(steps))
        show(f"{name}: x the ideal", sum(real) / sum(best), limit)
    else:
        show(f"{name}: ms of a call", (sum(real) - sum(best)) / calls * 1e3)


def show(name: str, value: float, limit: float | None = None) -> None:
    verdict = "" if limit is None else f"<= {limit:g}  {'ok' if value <= limit else 'MISSED'}"
    print(f"{name:40} {value:10.3f}  {verdict}", flush=True)


async def main(steps: int) -> None:
    chance = random.Random(0)

    def tail() -> list[float]:
        return [SLOW if chance.random() < SHARE else FAST for _ in range(4)]

    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    await compare("flat", [[[0.5]] * ROLLOUTS] * steps, 8, 1.1)
    await compare("tail", [[tail() for _ in range(ROLLOUTS)] for _ in range(2 * steps)], 16, 1.1)
    await compare("calls", [[[0.0] * 4] * ROLLOUTS] * steps, 16, None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int, nargs="?", default=3)
    asyncio.run(main(parser.parse_args().steps))
