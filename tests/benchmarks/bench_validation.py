"""How long rollouts take on simulated latencies, in validation and in training.

    python tests/benchmarks/bench_validation.py

256 prompts; an engine that generates all of them beside each other, 20 seconds for most and up to a few times
as many for some; an environment with one process, half a second for a call and two milliseconds for each
episode in it.  The limit is the slowest rollout with a call of its own for each of its turns, as if nobody
else used the environment.

Validation is batched, pipelined, and pipelined with one environment call for each rollout.  In training the
same number of rollouts is played as a step of groups of 8; a group's limit is its slowest rollout.  The row
``in lockstep`` is what it costs if the rollouts of a group wait for each other at each turn.

Under the virtual clock: these seconds are exact, and the same everywhere.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable

from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.playing import EnvironmentClient
from grpo_core.contracts.records import Episode, Feedback, Prompt, Weights
from grpo_core.environments.pool import EnvironmentPool
from grpo_core.loop.rollout import RolloutRequest, SamplingParams, derive_seed, play
from grpo_core.testing import FakeEngine, FakeEnvironment, FakeRenderer, clock
from grpo_core.validation.runner import Context, run_strategy
from grpo_core.validation.strategies import ScoringStrategy

PROMPTS, GROUP, SEEDS = 256, 8, range(20)
CALL, EPISODE = 0.5, 0.002


class Environment(FakeEnvironment):
    """Takes a while for each call, and a little more for each episode in it."""

    def __init__(self, turns: int) -> None:
        super().__init__(lambda episode: self.said(episode, turns), max_turns=turns)

    @staticmethod
    def said(episode: Episode, turns: int) -> Feedback:
        last = episode.turn + 1 == turns
        return Feedback(reward=1.0) if last else Feedback(done=False, messages="go on")

    async def evaluate(self, episodes):
        self.seconds = CALL + EPISODE * len(episodes)
        return await super().evaluate(episodes)


def validated(mode: str, turns: int, seed: int, wrap: Callable) -> tuple[float, int]:
    """Virtual seconds, and calls of the environment."""

    async def story() -> float:
        engine = FakeEngine(latency=lambda rng: rng.lognormvariate(3.0, 0.4), update_seconds=0.0)
        await engine.update_weights(Weights(version=0, location="", nbytes=0, tensors=()))
        prompts = [Prompt(messages=f"{i}", id=f"{i}", environment="task") for i in range(PROMPTS)]
        context = Context(
            version=0,
            prompts={"task": prompts},
            engine=engine,
            environments={"task": wrap(environment)},
            renderer=FakeRenderer(),
            sampling=SamplingParams(temperature=1.0, max_tokens=8),
            seed=seed,
        )
        results = await run_strategy(mode, ScoringStrategy(mode=mode), context)
        assert results["task"]["prompts"] == PROMPTS
        return asyncio.get_running_loop().time()

    environment = Environment(turns)
    return clock.run(story()), len(environment.calls)


def trained(turns: int, seed: int, wrap: Callable, *, lockstep: bool = False) -> list[float]:
    """Virtual seconds of each group of a step."""

    async def group(number: int, engine: FakeEngine, environment: EnvironmentClient) -> float:
        prompt = Prompt(messages=f"{number}", id=f"{number}", environment="task")
        requests = [
            RolloutRequest(prompt=prompt, seed=derive_seed(seed, number, i), group=prompt.id)
            for i in range(GROUP)
        ]
        rollouts = await play(
            requests,
            engine=engine,
            environments={"task": environment},
            renderer=FakeRenderer(),
            sampling=SamplingParams(temperature=1.0, max_tokens=8),
            lockstep=lockstep,
        )
        assert [rollout.turns for rollout in rollouts] == [turns] * GROUP
        return asyncio.get_running_loop().time()

    async def story() -> list[float]:
        engine = FakeEngine(latency=lambda rng: rng.lognormvariate(3.0, 0.4), update_seconds=0.0)
        await engine.update_weights(Weights(version=0, location="", nbytes=0, tensors=()))
        environment = wrap(Environment(turns))
        return await asyncio.gather(*(group(i, engine, environment) for i in range(PROMPTS // GROUP)))

    return clock.run(story())


def batcher(**options):
    return lambda environment: EnvironmentPool([environment], EnvironmentConfig(**options))


def show(name: str, value: float, limit: float | None = None, *, below: bool = False) -> None:
    feedback = ""
    if limit is not None:
        good = value <= limit if below else value >= limit
        feedback = f"{'<=' if below else '>='} {limit:g}  {'ok' if good else 'short'}"
    print(f"{name:62} {value:10.3f}  {feedback}", flush=True)


def compare(turns: int) -> None:
    merged = batcher(max_batch=256, max_wait=0.005)
    each = {
        "alone": [validated("pipelined", turns, seed, lambda environment: environment) for seed in SEEDS],
        "batched": [validated("batched", turns, seed, merged) for seed in SEEDS],
        "pipelined": [validated("pipelined", turns, seed, merged) for seed in SEEDS],
        "one call each": [validated("pipelined", turns, seed, batcher(max_batch=1)) for seed in SEEDS],
    }

    def times_the_limit(name: str) -> list[float]:
        pairs = zip(each[name], each["alone"], strict=True)
        return [seconds / limit for (seconds, _), (limit, _) in pairs]

    what = f"{turns} turn{'s' * (turns > 1)}"
    limit = statistics.median(seconds for seconds, _ in each["alone"])
    show(f"{what}: seconds of the slowest rollout with its calls", limit)
    show(
        f"{what}: one call for each rollout, x the limit", statistics.median(times_the_limit("one call each"))
    )
    worst = max(times_the_limit("batched"))
    show(
        f"{what}: batched, x the limit (worst of {len(SEEDS)})",
        worst,
        *([1.05] if turns == 1 else []),
        below=True,
    )
    show(f"{what}: batched, calls of the environment", max(c for _, c in each["batched"]), turns, below=True)
    worst = max(times_the_limit("pipelined"))
    show(f"{what}: pipelined, x the limit (worst of {len(SEEDS)})", worst, 1.02, below=True)
    calls = statistics.median(count for _, count in each["pipelined"])
    show(
        f"{what}: pipelined, calls for each of one call for each rollout",
        calls / (PROMPTS * turns),
        0.5,
        below=True,
    )
    faster = statistics.median(times_the_limit("one call each")) / statistics.median(
        times_the_limit("pipelined")
    )
    show(f"{what}: pipelined, x as fast as one call for each rollout", faster, 1.0)


def compare_training(turns: int) -> None:
    merged = batcher(max_batch=256, max_wait=0.005)
    limits = [trained(turns, seed, lambda environment: environment) for seed in SEEDS]

    def times_the_limit(**options: bool) -> float:
        """Seconds of a step: the mean over its groups; the worst of all seeds."""
        steps = [trained(turns, seed, merged, **options) for seed in SEEDS]
        return max(
            statistics.fmean(seconds / limit for seconds, limit in zip(step, alone, strict=True))
            for step, alone in zip(steps, limits, strict=True)
        )

    what = f"{turns} turns, training"
    show(f"{what}: in lockstep, x the limit (worst of {len(SEEDS)})", times_the_limit(lockstep=True))
    show(f"{what}: a group, x the limit (worst of {len(SEEDS)})", times_the_limit(), 1.02, below=True)


if __name__ == "__main__":
    for turns in (1, 3):
        compare(turns)
    compare_training(3)
