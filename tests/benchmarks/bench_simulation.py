"""The pipeline by itself: how fast it is simulated, what a rollout costs it, and whether its memory grows.

    python tests/benchmarks/bench_simulation.py [SEEDS] [FIRST]

Costs are of one core.  The engine and the environment answer in virtual time, so that what is left is the
pipeline: tasks, buffer, rollouts, batches.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from attrs import evolve

from grpo_core.loop.pipeline import Learning, Playing
from grpo_core.processes.memory import spare_the_collector
from grpo_core.testing.fakes import FakePrompts

sys.path.insert(0, str(Path(__file__).parent.parent))  # the simulation lies beside the tests
from simulation.faults import NONE
from simulation.runs import simulate

from grpo_core.contracts.records import Completion, Judgement, SessionStart, StepResult
from grpo_core.loop.buffer import Buffer
from grpo_core.loop.pipeline import Pipeline, Schedule
from grpo_core.loop.rollout import SamplingParams
from grpo_core.loop.rows import group as group_advantages
from grpo_core.testing import FakeEnvironment, FakeRenderer, FakeTrainer, clock, prompts

SEEDS = 10_000
GROUP = 8


class Engine:
    """Answers a whole call after one sleep."""

    def __init__(self):
        self.random, self.version = random.Random(0), 0

    async def generate(self, requests):
        import asyncio

        await asyncio.sleep(self.random.expovariate(1.0))
        tokens = (97, 98, 99, 100)
        versions = (self.version,) * 4
        done = Completion(token_ids=tokens, logprobs=(-1.0,) * 4, versions=versions, finish_reason="stop")
        return [done] * len(requests)

    async def update_weights(self, weights):
        self.version = weights.version


class Trainer(FakeTrainer):
    """Keeps no batches."""

    async def step(self, batch):
        self.version += 1
        return StepResult(version=self.version, metrics={})


class Endless:
    def __init__(self):
        self.prompts = prompts(1000)

    def take(self, n):
        return [self.prompts[i % 1000] for i in range(n)]


def pipeline(*, prompts_per_step: int, steps: int, environment: FakeEnvironment) -> Pipeline:
    stream = Endless()
    return Pipeline(
        buffer=Buffer(prompts_per_step=prompts_per_step, max_staleness=1, num_steps=steps),
        prompts=FakePrompts(lambda request: stream.take(request.expected_prompts)),
        engine=Engine(),
        playing=Playing(
            environments={"task": environment},
            renderer=FakeRenderer(),
            sampling=SamplingParams(temperature=1.0, max_tokens=8),
            group_size=GROUP,
        ),
        learning=Learning(advantages=group_advantages),
        trainer=Trainer(),
        schedule=Schedule(rollout_deadline=600.0),
    )


class Instant(FakeEnvironment):
    """Keeps no account of its calls and sessions."""

    async def open(self, prompts):
        return [SessionStart()] * len(prompts)

    async def close(self, sessions):
        pass

    async def evaluate(self, episodes):
        return [Judgement(reward=float(i % 2)) for i in range(len(episodes))]


def cost(in_flight: int) -> float:
    """Microseconds of CPU for each rollout, with so many of them outstanding."""
    per_step = in_flight // GROUP // 2
    steps = max(4, 20_000 // (per_step * GROUP))
    main = pipeline(prompts_per_step=per_step, steps=steps, environment=Instant()).run()
    began = time.process_time()
    clock.run(main)
    return (time.process_time() - began) / (steps * per_step * GROUP) * 1e6


def resident() -> int:
    """KB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // 1024


def growth(steps: int = 100_000) -> float:
    """KB of memory for each step, over the second half of many."""
    half: list[int] = []

    def emit(event):
        if type(event).__name__ == "StepEnded" and event.step == steps // 2:
            half.append(resident())

    main = pipeline(prompts_per_step=4, steps=steps, environment=Instant())
    main.emit = emit
    clock.run(main.run())
    return (resident() - half[0]) / (steps / 2)


def violations(seeds: range) -> list[str]:
    found = []
    for seed in seeds:
        policy, max_staleness = ("deadline", "in_order")[seed % 2], seed // 2 % 5
        outcome = simulate(seed, policy=policy, max_staleness=max_staleness)
        if outcome.violations:
            found.append(f"seed {seed}, {policy}, max_staleness {max_staleness}: {outcome.violations[0]}")
    return found


def show(name: str, value: float, limit: float | None = None, *, below: bool = False) -> None:
    feedback = ""
    if limit is not None:
        good = value <= limit if below else value >= limit
        feedback = f"{'<=' if below else '>='} {limit:g}  {'ok' if good else 'short'}"
    print(f"{name:60} {value:10.3f}  {feedback}", flush=True)


def main(total: int, first: int) -> int:
    spare_the_collector()  # as the process of a run does
    for in_flight, limit in ((1_000, 30.0), (10_000, 40.0), (100_000, 80.0)):
        show(
            f"us of orchestration for a rollout, {in_flight:,} in flight", cost(in_flight), limit, below=True
        )
    show("growth of memory (KB for a step)", growth(), 1.0, below=True)
    show("pipelines a second and core, each killed once and resumed", speed(), 20.0)
    broken = list(search(range(first, first + total)))
    show(f"of {total:,} simulations, those that break a law", len(broken), 0, below=True)
    return 1 if broken else 0


def speed(seeds: int = 60) -> float:
    """96 prompts in groups of four; without faults but the kill.  Of CPU time."""
    faults = evolve(NONE, kill=1.0)
    began = time.process_time()
    for seed in range(seeds):
        policy, max_staleness = ("deadline", "in_order")[seed % 2], seed // 2 % 5
        simulate(seed, policy=policy, max_staleness=max_staleness, faults=faults, lives=2)
    return seeds / (time.process_time() - began)


def search(seeds: range) -> Iterator[str]:
    """The runs that break a law, each with its seed."""
    cores = os.cpu_count() or 1
    chunks = [seeds[i : i + 50] for i in range(0, len(seeds), 50)]
    began, done = time.perf_counter(), 0
    with ProcessPoolExecutor(cores) as pool:
        for chunk, found in zip(chunks, pool.map(violations, chunks), strict=True):
            done += len(chunk)
            print("\n".join(found), end="\n" if found else "", flush=True)
            yield from found
            if done % 500 == 0 or done == len(seeds):
                rate = done / (time.perf_counter() - began) / cores
                print(f"    {done:,} of {len(seeds):,} seeds, {rate:.1f} a second and core", flush=True)


if __name__ == "__main__":
    given = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    sys.exit(main(*given, *[SEEDS, 0][len(given) :]))
