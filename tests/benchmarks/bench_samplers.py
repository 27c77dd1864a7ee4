"""The cost of choosing prompts.  (The gain: ``tests/benchmarks/curriculum.py``.)

    python tests/benchmarks/bench_samplers.py

Prints a line for each built-in sampler: 5,000 prompts of two tasks in requests of 16, through loaders,
sampler and check, in one process.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from attrs import evolve

from grpo_core.contracts.protocols import Sampler
from grpo_core.contracts.records import Prompt, SampleRequest
from grpo_core.data.loaders import IndexedLoader
from grpo_core.data.samplers import Mix, RoundRobin, checked_sample
from grpo_plugin_curriculum.curriculum import Curriculum, Schedule, TaskOrder

PROMPTS, REQUEST, LIMIT = 5000, 16, 0.050
SAMPLERS: Mapping[str, Callable[[], Sampler]] = {
    "mix": Mix,
    "round_robin": RoundRobin,
    "chosen": lambda: TaskOrder([["a", "b"], "a"]),
    "schedule": lambda: Schedule({"a": [[0, 1], [100, 0.2]], "b": [[0, 0.1], [100, 1]]}),
    "curriculum": Curriculum,
}


def seconds(make: Callable[[], Sampler]) -> float:
    """For all prompts, once the loaders are open."""
    prompts = [Prompt(messages=f"{i}", id=str(i)) for i in range(20_000)]
    tasks = {task: [evolve(p, environment=task) for p in prompts] for task in "ab"}
    loaders = {task: IndexedLoader(task, part, seed=0) for task, part in tasks.items()}
    for loader in loaders.values():
        loader.take(1)
    sampler = make()
    begin = time.perf_counter()
    for step in range(PROMPTS // REQUEST):
        request = SampleRequest(
            generation_version=step, target_version=step, current_version=step, expected_prompts=REQUEST
        )
        checked_sample(sampler, "timed", loaders, request)
    return time.perf_counter() - begin


def cost() -> None:
    for name, make in SAMPLERS.items():
        taken = statistics.median(seconds(make) for _ in range(5))
        feedback = "ok" if taken <= LIMIT else "short"
        print(
            f"{name:<12} {PROMPTS:,} prompts {taken * 1000:6.1f} ms  limit {LIMIT * 1000:.0f} ms  {feedback}"
        )


if __name__ == "__main__":
    cost()
