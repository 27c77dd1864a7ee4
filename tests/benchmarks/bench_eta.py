"""The forecast of a running run's end against the end, on runs of the real pipeline in virtual time.

    python tests/benchmarks/bench_eta.py 100 --seed 1000

Each run has random sizes and service times; completions get longer or shorter over the run, and validations
and checkpoints come at random intervals.  It is asked once, at a random step, how long the run will go on.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
from collections.abc import Sequence
from statistics import median

from attrs import evolve, frozen

from grpo_core.config import build
from grpo_core.events import Event, RunStarted, StepEnded
from grpo_core.planning.forecast import forecast
from grpo_core.planning.outcomes import DrawnOutcomes, Outcome
from grpo_core.planning.times import (
    CheckpointTimes,
    EngineTimes,
    EnvironmentTimes,
    RolloutTimes,
    Times,
    TrainerTimes,
)
from grpo_core.plugins.host import PluginHost
from grpo_core.reporting.eta import CONFIDENCE, remaining


@frozen
class Drifting(DrawnOutcomes):
    """Completions whose mean length grows, or falls, linearly over the run."""

    growth: float = 0.0

    def group(self, progress: float, size: int, rng: random.Random) -> list[Outcome]:
        now = evolve(self.times, tokens=max(1.0, self.times.tokens * (1 + self.growth * progress)))
        return DrawnOutcomes(now).group(progress, size, rng)


HOST = PluginHost.discover(allow=[])


def play(seed: int) -> list[float]:
    """Return the seconds of each step of a random run, from the end of the one before."""
    rng = random.Random(seed)
    tokens = rng.uniform(50, 400)
    steps, prompts, group = rng.randrange(30, 101), rng.choice([4, 8]), rng.choice([2, 4])
    computing = TrainerTimes(
        step=rng.uniform(0.5, 8), token=rng.uniform(0, 0.001), spread=rng.uniform(0, 0.3)
    )
    times = Times(
        engine=EngineTimes(token=0.02, row=rng.choice([0.0, 0.0005]), sync=rng.uniform(0, 1)),
        rollout=RolloutTimes(tokens=tokens, spread=rng.uniform(0.2, 1.0), pass_rate=rng.uniform(0.2, 0.8)),
        environment=EnvironmentTimes(turn=rng.uniform(0, 2), spread=rng.uniform(0, 1)),
        trainer=computing,
        checkpoint=CheckpointTimes(cut=rng.uniform(0, 2), write=rng.uniform(0, 5)),
    )
    table = {
        "tasks": {"guess": {"env": "none"}},
        "trainer": {"steps": steps, "prompts_per_step": prompts},
        "rollout": {"group_size": group, "max_tokens": 2000},
        "pipeline": {"max_staleness": rng.choice([0, 1, 1, 2, 4])},
        "validation": {"every": rng.choice([5, 10, 20]), "prompts": 16},
        "checkpoint": {"every": rng.choice([5, 10, 20])},
        "seed": seed,
    }
    ends: list[float] = []

    def emit(event: Event) -> None:
        if isinstance(event, RunStarted | StepEnded):
            ends.append(asyncio.get_running_loop().time())

    outcomes = Drifting(times.rollout, growth=rng.uniform(-0.3, 0.5))
    forecast(build([table]), times, outcomes, HOST, seed=seed, held_out=16, emit=emit)
    return [end - start for start, end in itertools.pairwise(ends)]


def asked(seconds: Sequence[float], seed: int) -> tuple[bool, float, float] | None:
    """Return whether the interval held, its width and the error of the forecast, as shares of the truth."""
    at = random.Random(seed).randrange(round(0.1 * len(seconds)), round(0.9 * len(seconds)))
    told, truth = remaining(seconds[:at], len(seconds) - at), sum(seconds[at:])
    if told is None:
        return None
    return told.low <= truth <= told.high, (told.high - told.low) / truth, abs(told.expected / truth - 1)


def main() -> None:
    """Play the runs, ask each once, and print what the intervals were worth."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("runs", type=int)
    options.add_argument("--seed", type=int, default=0)
    given = options.parse_args()
    answers = []
    for seed in range(given.seed, given.seed + given.runs):
        answers.append(asked(play(seed), seed))
        print(f"\r{len(answers)} of {given.runs}", end="", file=sys.stderr)
    told = [answer for answer in answers if answer is not None]
    found = {
        "runs": given.runs,
        "seeds": f"{given.seed} to {given.seed + given.runs - 1}",
        "asked too early": len(answers) - len(told),
        "intervals that held": sum(held for held, _, _ in told) / len(told),
        "intended": CONFIDENCE,
        "median width": median(width for _, width, _ in told),
        "median error": median(error for _, _, error in told),
    }
    print("\r" + json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
