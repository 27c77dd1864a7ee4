"""Does asynchronous training learn as well?  Two tasks with several bounds of staleness and corrections.

    nice python tests/benchmarks/bench_learning.py NUMBERS.json [--seeds 5] [--jobs 2] [--task sort]
    nice python tests/benchmarks/bench_learning.py NUMBERS.json --task sums --seeds 3
    python tests/benchmarks/bench_learning.py NUMBERS.json --pace

Hours on two cores.  Each run is kept in NUMBERS.json as it ends: its rewards in windows of ten steps, its
accuracy in the end, and its mean staleness.  A second call goes on where the first was interrupted.
The tasks ``sums`` and ``largest`` are another study: SmolLM2-135M learns from rewards, and from hints.
``--pace`` measures the seconds of a step for each bound of staleness instead, in turns, on a machine that
nobody else uses.
``docs/learning.json`` has the numbers of docs/learning.md, which ``docs/_learning.py`` writes.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from statistics import fmean
from threading import Lock
from typing import Any

GRPO = Path(sys.executable).with_name("grpo-core")
ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples/smollm2"
WINDOW = 10
"""Steps whose mean reward is kept."""
ROUNDS, PACED, FIRST_STEPS = 3, 50, 10
"""Runs of each bound by which its pace is measured, their steps, and how many of these do not count."""
STEPS = {"sort": 200, "arrivals": 120, "sums": 40, "largest": 40}
CORRECTIONS: Mapping[str, Mapping[str, Any]] = {
    "off": {"loss.options.correction": "off"},
    "token_truncate": {"loss.options.correction": "token_truncate"},
    "token_mask": {"loss.options.correction.name": "token_mask", "loss.options.correction.floor": 0.5},
    "sequence_truncate": {"loss.options.correction": "sequence_truncate"},
    "sequence_mask": {"loss.options.correction.name": "sequence_mask", "loss.options.correction.floor": 0.5},
    "geometric_mask": {
        "loss.options.correction.name": "geometric_mask",
        "loss.options.correction.floor": 0.5,
    },
    "generation": {"trainer.proximal": "generation"},
}
"""The settings of each correction.  The caps are the default, 2."""
HELD_OUT = {"tasks.sums.options.held_out": 400, "validation.prompts": 400, "validation.every": 10}
LOSSES: Mapping[str, Mapping[str, Any]] = {
    "grpo": HELD_OUT,
    "grpo_4": HELD_OUT | {"trainer.updates_per_step": 4},
    "hints": HELD_OUT,
}
"""The settings of each way to learn sums; all have 64 rollouts a step, two of them 4 updates."""
LARGEST = ROOT / "tests/benchmarks/largest.py"
ARMS: Mapping[str, Mapping[int, tuple[str, ...]]] = {
    "sort": {
        0: ("off",),
        2: tuple(CORRECTIONS),
        4: tuple(CORRECTIONS),
        8: ("token_truncate", "geometric_mask"),
        1: tuple(CORRECTIONS),
    },
    "arrivals": {
        0: ("off",),
        2: ("token_truncate", "off"),
        4: ("token_truncate", "off"),
        1: ("token_truncate",),
    },
    "sums": {0: tuple(LOSSES)},
    "largest": {0: ("grpo", "hints")},
}
"""By task and bound of staleness.  Without staleness a correction only mends rounding."""

Key = tuple[str, int, str, int]
"""Task, bound of staleness, correction (of sums: way to learn), seed."""


def runs(tasks: list[str], seeds: int) -> Iterator[Key]:
    """All runs, seed by seed: what is interrupted has compared all arms as often as another."""
    for seed in range(seeds):
        for task in tasks:
            for bound, corrections in ARMS[task].items():
                yield from ((task, bound, correction, seed) for correction in corrections)


def trained(key: Key) -> dict[str, Any]:
    """One run: its rewards in windows of steps, its accuracy in the end, and its mean staleness."""
    return summary(key[0], metrics(key, STEPS[key[0]]))


def metrics(key: Key, n: int) -> list[dict[str, Any]]:
    """Train for so many steps, and return the metrics."""
    task, bound, correction, seed = key
    settings = {
        "seed": seed,
        "pipeline.max_staleness": bound,
        "trainer.proximal": "recompute",
        "trainer.steps": n,
        "checkpoint.every": 0,
        "validation.every": n,
        "validation.prompts": 1000,
        "tracking.trackers": '["files"]',
        "tracking.files.every": n,
        **({"tasks.sums.env": f"{LARGEST}:Largest"} if task == "largest" else {}),
        **{**CORRECTIONS, **LOSSES}[correction],
    }
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / task
        example = EXAMPLES / ("hints.toml" if correction == "hints" else "sums.toml")
        what = [example] if correction in LOSSES else ["--env", f"math:{task}"]
        command = [GRPO, "train", *what, "--output", run]
        for name, value in settings.items():
            command += ["--set", f"{name}={value}"]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{key}: {done.stderr[-500:]}")
        return [json.loads(line) for line in (run / "metrics.jsonl").open()]


def summary(task: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    task = "sums" if task == "largest" else task  # whose environment it replaces
    steps = [row for row in rows if f"reward/{task}" in row]
    validated = [row[name] for row in rows if (name := f"validation/{task}/accuracy") in row]
    windows = [steps[i : i + WINDOW] for i in range(0, len(steps), WINDOW)]
    return {
        "reward": [round(fmean(row[f"reward/{task}"] for row in window), 4) for window in windows],
        "accuracy": validated[-1],
        "validated": validated,
        "staleness": round(fmean(row["staleness_mean"] for row in steps), 3),
        "mismatch_kl": round(fmean(row["mismatch_kl"] for row in steps if "mismatch_kl" in row), 5),
    }


def read(numbers: Path) -> dict[str, Any]:
    return json.loads(numbers.read_text()) if numbers.exists() else {}


def keep(known: Mapping[str, Any], numbers: Path) -> None:
    numbers.write_text(json.dumps(known, indent=0, sort_keys=True) + "\n")


def measure_pace(numbers: Path, tasks: list[str]) -> None:
    """Measure the seconds of a step after the first ones, for each bound of staleness in turn."""
    pace: dict[str, list[float]] = {}
    for _, task, bound in product(range(ROUNDS), tasks, sorted(ARMS["sort"])):
        rows = metrics((task, bound, "token_truncate" if bound else "off", 0), PACED)
        steps = [row["time/step"] for row in rows if "time/step" in row]
        pace.setdefault(f"{task}/{bound}", []).append(round(fmean(steps[FIRST_STEPS:]), 4))
        print(f"{task}, staleness {bound}: {pace[f'{task}/{bound}'][-1]:.3f} s a step", flush=True)
    known = read(numbers)
    keep(known | {"pace": known.get("pace", {}) | pace}, numbers)


def measure(numbers: Path, tasks: list[str], seeds: int, jobs: int) -> None:
    """Train what is not known yet, and keep each run as it ends."""
    known = read(numbers)
    lock = Lock()

    def one(key: Key) -> None:
        name = "/".join(map(str, key))
        if name in known:
            return
        found = trained(key)
        with lock:
            known[name] = found
            keep(known, numbers)
        print(f"{name}: {found['accuracy']:.1%}, mean reward {fmean(found['reward']):.3f}", flush=True)

    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(one, runs(tasks, seeds)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("numbers", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--task", choices=list(STEPS), action="append")
    parser.add_argument(
        "--pace", action="store_true", help="measure the seconds of a step, and train nothing else"
    )
    given = parser.parse_args()
    tasks = given.task or ["sort", "arrivals"]
    if given.pace:
        return measure_pace(given.numbers, tasks)
    measure(given.numbers, tasks, given.seeds, given.jobs)


if __name__ == "__main__":
    main()
