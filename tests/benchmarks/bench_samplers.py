"""What choosing prompts costs, and what a curriculum gains.

    python tests/benchmarks/bench_samplers.py
    python tests/benchmarks/bench_samplers.py --curriculum [--seeds 3]

The first prints a line for each built-in sampler: 5,000 prompts of two tasks in requests of 16, through
loaders, sampler and check, in one process.  The second trains two tasks of different difficulty with each
sampler and counts the steps until both have reached the target in validation.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from attrs import evolve

from grpo_core.curriculum import Curriculum, Schedule
from grpo_core.loaders import TaskLoader
from grpo_core.protocols import Sampler
from grpo_core.records import Prompt, SampleRequest
from grpo_core.samplers import Chosen, Mix, RoundRobin, checked_sample

PROMPTS, REQUEST, LIMIT = 5000, 16, 0.050
SAMPLERS: Mapping[str, Callable[[], Sampler]] = {
    "mix": Mix,
    "round_robin": RoundRobin,
    "chosen": lambda: Chosen([["a", "b"], "a"]),
    "schedule": lambda: Schedule({"a": [[0, 1], [100, 0.2]], "b": [[0, 0.1], [100, 1]]}),
    "curriculum": Curriculum,
}


def seconds(make: Callable[[], Sampler]) -> float:
    """For all prompts, once the loaders are open."""
    prompts = [Prompt(messages=f"{i}", id=str(i)) for i in range(20_000)]
    tasks = {task: [evolve(p, environment=task) for p in prompts] for task in "ab"}
    loaders = {task: TaskLoader(task, part, seed=0) for task, part in tasks.items()}
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
        verdict = "ok" if taken <= LIMIT else "short"
        print(
            f"{name:<12} {PROMPTS:,} prompts {taken * 1000:6.1f} ms  limit {LIMIT * 1000:.0f} ms  {verdict}"
        )


# ---------------------------------------------------------------------------------- the curriculum

TARGET, STEPS, EVERY = 0.6, 140, 10
TASKS = {
    "tasks.easy.env": "math:sort",
    "tasks.hard.env": "math:reverse",
    "tasks.hard.options": "{ length = 3 }",
}
ARMS: Mapping[str, Mapping[str, str]] = {
    "uniform mix": {"sampler.name": "mix"},
    "schedule": {
        "sampler.name": "schedule",
        "sampler.options": "{ points = { hard = [[5, 0.1], [20, 0.9]], easy = [[5, 0.9], [20, 0.1]] } }",
    },
    "curriculum": {
        "sampler.name": "curriculum",
        "sampler.options": "{ high = 0.85, window = 64, rest = 0.1 }",
    },
}


def trained(settings: Mapping[str, str], seed: int) -> tuple[int | None, dict[str, float]]:
    """The step at which both tasks had reached the target (None: never), and what they had in the end."""
    given = {
        **TASKS,
        **settings,
        "seed": str(seed),
        "model.warm_start_steps": "70",
        "trainer.steps": str(STEPS),
        "trainer.prompts_per_step": "32",
        "validation.every": str(EVERY),
        "checkpoint.every": "0",
    }
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        options = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
        program = str(Path(sys.executable).parent / "grpo-core")
        subprocess.run(
            [program, "train", "--output", str(run), *options], check=True, stdout=subprocess.DEVNULL
        )
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [
        (line["step"], {task: line[f"validation/{task}/accuracy"] for task in ("easy", "hard")})
        for line in lines
        if "validation/hard/accuracy" in line
    ]
    reached = next((step for step, scores in curve if min(scores.values()) >= TARGET), None)
    return reached, curve[-1][1]


def curriculum(seeds: int) -> None:
    print(f"steps until both tasks are at {TARGET:.0%} (measured every {EVERY}, {STEPS} at most)")
    for seed in range(seeds):
        for name, settings in ARMS.items():
            begin = time.perf_counter()
            reached, last = trained(settings, seed)
            scores = ", ".join(f"{task} {score:.2f}" for task, score in last.items())
            took = time.perf_counter() - begin
            when = f"step {reached}" if reached else "never"
            print(f"seed {seed}  {name:<12} {when:>8}  in the end: {scores}  ({took:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curriculum", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    given, _ = parser.parse_known_args()
    if given.curriculum:
        curriculum(given.seeds)
    else:
        cost()


if __name__ == "__main__":
    main()
