"""Choosing prompts: its cost with a million of them, and what it saves a simulated learner.

    python tests/benchmarks/bench_prompts.py [--seeds 5]

Prints the memory of the sampler's knowledge and the time of a choice, with 1,000,000 prompts.  Then three
simulated tasks, by what their prompts are like; each is learnt with all prompts alike (uniform), with dynamic
sampling, and with ``learnable_prompts`` and dynamic sampling.  A line tells the rollouts until the mean
success rate over all prompts has reached its target.  The simulation has the real loader, sampler and filter,
and no model: a prompt is solved with probability 1 / (1 + exp(difficulty - skill - own)); a trained group
raises ``skill`` and the prompt's ``own`` by the variance of its rewards.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence

from grpo_core.contracts.protocols import Sampler
from grpo_core.contracts.records import Group, Prompt, Rollout, SampleRequest
from grpo_core.data.loaders import IndexedLoader
from grpo_core.data.samplers import Mix, PromptStream
from grpo_core.loop.dynamic import DynamicSampling
from grpo_plugin_curriculum.learnable_prompts import LearnablePrompts

MANY, REQUEST, CHOICES = 1_000_000, 16, 20_000
GROUP, STEP, PROMPTS, MOST = 8, 16, 500, 400_000
TASKS: Mapping[str, Callable[[random.Random], float]] = {
    "spread": lambda chance: chance.uniform(-4, 6),
    "mostly solved": lambda chance: chance.gauss(4, 1) if chance.random() < 0.3 else chance.gauss(-4, 1),
    "mostly hopeless": lambda chance: chance.gauss(1, 1) if chance.random() < 0.3 else chance.gauss(9, 1),
}
TARGETS = {"spread": 0.75, "mostly solved": 0.90, "mostly hopeless": 0.30}
ARMS: Mapping[str, tuple[Callable[[], Sampler], bool]] = {
    "uniform": (Mix, False),
    "dynamic": (Mix, True),
    "learnable": (LearnablePrompts, True),
}


class Source(Sequence[Prompt]):
    """Prompts that are computed when they are read, so that they take no memory."""

    fingerprint = "none"

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, place: int) -> Prompt:  # type: ignore[override]
        return Prompt(messages="x", id=str(place), environment="task")


def request(n: int, version: int) -> SampleRequest:
    return SampleRequest(
        generation_version=version, target_version=version, current_version=version, expected_prompts=n
    )


def group(prompt: Prompt, rewards: Sequence[float], version: int) -> Group:
    return Group(
        prompt=prompt,
        rollouts=tuple(Rollout(reward=reward) for reward in rewards),
        generation_version=version,
        target_version=version,
    )


def cost() -> None:
    """Measure memory and time with a million prompts."""
    tracemalloc.start()
    stream = PromptStream(
        sampler=LearnablePrompts(),
        loaders={"task": IndexedLoader("task", Source(MANY), seed=0)},
        name="timed",
    )
    stream.draw(request(1, 0))
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    chance, taken = random.Random(0), 0.0
    for step in range(CHOICES // REQUEST):
        begin = time.perf_counter()
        prompts = stream.draw(request(REQUEST, step))
        taken += time.perf_counter() - begin
        stream.passed_over.clear()
        done = [group(p, [float(chance.random() < 0.9) for _ in range(GROUP)], step) for p in prompts]
        begin = time.perf_counter()
        stream.observe(done)
        taken += time.perf_counter() - begin
    each = taken / CHOICES * 1e6
    print(f"{MANY:,} prompts: {held / 1e6:.0f} MB (limit 100), {each:.0f} us a choice (limit 50)")


def learnt(task: str, arm: str, seed: int) -> int | None:
    """Return the rollouts until the target is reached; None: not with ``MOST`` of them."""
    make, filters = ARMS[arm]
    chance = random.Random(f"{task}/{seed}")
    difficulty = [TASKS[task](chance) for _ in range(PROMPTS)]
    own = [0.0] * PROMPTS
    skill, rollouts, version = 0.0, 0, 0
    loaders = {"task": IndexedLoader("task", Source(PROMPTS), seed=seed)}
    stream = PromptStream(sampler=make(), loaders=loaders, name=arm)
    dynamic = DynamicSampling(max_extra_groups=10**9) if filters else None

    def rate(place: int) -> float:
        return 1 / (1 + math.exp(difficulty[place] - skill - own[place]))

    while rollouts < MOST:
        if statistics.fmean(rate(place) for place in range(PROMPTS)) >= TARGETS[task]:
            return rollouts
        trained: list[Group] = []
        while len(trained) < STEP:
            for prompt in stream.draw(request(STEP - len(trained), version)):
                p = rate(int(prompt.id))
                one = group(prompt, [float(chance.random() < p) for _ in range(GROUP)], version)
                rollouts += GROUP
                if dynamic is None or dynamic.rejects(one) is None:
                    trained.append(one)
                else:
                    stream.observe([one])
            stream.passed_over.clear()
        stream.observe(trained)
        for one in trained:
            mean = statistics.fmean(rollout.reward or 0.0 for rollout in one.rollouts)
            own[int(one.prompt.id)] += 2.0 * mean * (1 - mean)
            skill += 0.01 * mean * (1 - mean)
        version += 1
        if dynamic is not None:
            dynamic.read()
    return None


def gains(seeds: int) -> Iterator[str]:
    """A line for each task."""
    for task in TASKS:
        found = {arm: [learnt(task, arm, seed) for seed in range(seeds)] for arm in ARMS}
        middle = {arm: statistics.median(n or MOST for n in each) for arm, each in found.items()}
        uniform, dynamic = (middle["learnable"] / middle[arm] for arm in ("uniform", "dynamic"))
        counts = ", ".join(f"{arm} {count:,.0f}" for arm, count in middle.items())
        yield f"{task:<16} rollouts to {TARGETS[task]:.0%}: {counts}"
        yield f"{'':<16} learnable takes {uniform:.2f} of uniform, {dynamic:.2f} of dynamic"


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=5)
    cost()
    for line in gains(parser.parse_args().seeds):
        print(line, flush=True)
