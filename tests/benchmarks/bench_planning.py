"""Forecasts of ``grpo-core whatif`` against runs that are made after them.

    python tests/benchmarks/bench_planning.py --output planning.json
    python tests/benchmarks/bench_planning.py --real --output real.json

A run of the present configuration is recorded for each seed.  From it alone, the seconds per step of other
configurations are forecast and written down.  Then these are run: the whole program, with an engine, a
trainer and an environment that sleep (``sleeping.py``), so that a busy machine changes little.  With
``--real`` it is the demo with its engine and trainer, one run after the other, for a machine without other
work.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean, median
from typing import Any

from sleeping import share

HERE = Path(__file__).parent
PARTS = HERE / "sleeping.py"
GRPO = Path(sys.executable).with_name("grpo-core")
BASE = {
    "engine.name": f"{PARTS}:SleepingEngine",
    "trainer.name": f"{PARTS}:SleepingTrainer",
    "tasks.guess.env": f"{PARTS}:Guessing",
    "model.options.warm_start_steps": 0,
    "trainer.steps": 24,
    "trainer.prompts_per_step": 8,
    "rollout.group_size": 4,
    "rollout.max_tokens": 100,
    "pipeline.max_staleness": 1,
    "validation.every": 10,
    "validation.at_start": False,
    "validation.prompts": 16,
    "checkpoint.every": 0,
}
REAL = BASE | {
    "engine.name": "local",
    "engine.threads": 1,
    "trainer.name": "torch",
    "trainer.threads": 1,
    "trainer.steps": 40,
    "trainer.prompts_per_step": 32,
    "rollout.group_size": 8,
    "rollout.max_tokens": 32,
    "model.options.warm_start_steps": 60,
}
del REAL["tasks.guess.env"]
REAL["tasks.sort.env"] = "math:sort"


def configurations(base: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the changes of each configuration that is forecast."""
    prompts, group = base["trainer.prompts_per_step"], base["rollout.group_size"]
    found = {
        "as recorded": {},
        "max_staleness 0": {"pipeline.max_staleness": 0},
        "max_staleness 2": {"pipeline.max_staleness": 2},
        "max_staleness 4": {"pipeline.max_staleness": 4},
        f"group_size {2 * group}": {"rollout.group_size": 2 * group},
        f"prompts_per_step {prompts // 2}": {"trainer.prompts_per_step": prompts // 2},
        f"prompts_per_step {2 * prompts}, max_staleness 0": {
            "trainer.prompts_per_step": 2 * prompts,
            "pipeline.max_staleness": 0,
        },
        "2 engines, max_staleness 0": {"engine.workers": 2, "pipeline.max_staleness": 0},
        "no in-flight updates": {"pipeline.in_flight_updates": False},
        "in_order, max_staleness 2": {"pipeline.policy": "in_order", "pipeline.max_staleness": 2},
        f"max_in_flight {prompts * group // 2}": {"rollout.max_in_flight": prompts * group // 2},
        "validation every 2 steps": {"validation.every": 2},
    }
    if base is REAL:  # on two cores a second engine has no hardware of its own, which the forecast gives it
        del found["2 engines, max_staleness 0"]
    return found


def options(settings: dict[str, Any]) -> list[str]:
    """Return settings as options of the command line."""
    return [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]


def train(directory: Path, seed: int, settings: dict[str, Any]) -> float:
    """Make a run; return its seconds per step as ``whatif`` reads them."""
    settings = settings | {"seed": seed}
    command = [GRPO, "train", "--quiet", "--output", directory, *options(settings)]
    ended = subprocess.run(command, capture_output=True, text=True)
    if ended.returncode:
        raise RuntimeError(f"{command}: {ended.stderr[-500:]}")
    recorded, *_ = whatif(directory, {}, 1)["rows"]
    return recorded["seconds_per_step"]


def whatif(directory: Path, changes: dict[str, Any], staleness: object) -> dict:
    """Ask the command for one variant."""
    sweep = ["--sweep", f"pipeline.max_staleness={staleness}"]
    command = [GRPO, "whatif", directory, "--json", *options(changes), *sweep]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout)


def predicted(directory: Path, base: dict[str, Any], changes: dict[str, Any]) -> float:
    """Return the seconds per step that ``whatif`` forecasts from a recorded run."""
    staleness = (base | changes)["pipeline.max_staleness"]
    found: float = whatif(directory, changes, staleness)["rows"][-1]["seconds_per_step"]
    return found


def tau(pairs: list[tuple[float, float]]) -> float:
    """Return Kendall's rank correlation of forecasts and runs."""
    signs = [(a - c) * (b - d) for (a, b), (c, d) in itertools.combinations(pairs, 2)]
    return (sum(sign > 0 for sign in signs) - sum(sign < 0 for sign in signs)) / len(signs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("planning.json"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=4, help="runs at the same time; they mostly sleep")
    parser.add_argument("--only", type=int, help="so many configurations")
    parser.add_argument("--real", action="store_true", help="the demo instead of parts that sleep")
    given = parser.parse_args()
    base = REAL if given.real else BASE
    at_once = 1 if given.real else given.at_once
    chosen = dict(list(configurations(base).items())[: given.only])
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(at_once) as pool:
        recorded = {seed: Path(scratch) / f"recorded-{seed}" for seed in seeds}
        list(pool.map(lambda seed: train(recorded[seed], seed, base), seeds))
        forecasts = {
            (name, seed): predicted(recorded[seed], base, changes)
            for name, changes in chosen.items()
            for seed in seeds
        }
        told = {f"{name}, seed {seed}": value for (name, seed), value in forecasts.items()}
        print(json.dumps(told), flush=True)
        jobs = [(name, seed) for seed in seeds for name in chosen]  # the kinds take turns
        runs = pool.map(
            lambda job: train(
                Path(scratch) / f"{list(chosen).index(job[0])}-{job[1]}", 100 + job[1], base | chosen[job[0]]
            ),
            jobs,
        )
        took = dict(zip(jobs, runs, strict=True))
    rows: list[dict[str, Any]] = [
        {"configuration": name, "seed": seed, "forecast": forecasts[name, seed], "run": took[name, seed]}
        for name, seed in jobs
    ]
    errors = [abs(row["forecast"] / row["run"] - 1) for row in rows]
    means = [
        (fmean(forecasts[name, seed] for seed in seeds), fmean(took[name, seed] for seed in seeds))
        for name in chosen
    ]
    summary = {
        "median_error": median(errors),
        "p90_error": share(errors, 0.9),
        "largest_error": max(errors),
        "tau": tau(means),
    }
    given.output.write_text(json.dumps({**summary, "rows": rows}, indent=2) + "\n")
    for name, (forecast, run) in zip(chosen, means, strict=True):
        print(f"{name:<40} forecast {forecast:6.3f}  run {run:6.3f}  {forecast / run - 1:+.1%}")
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
