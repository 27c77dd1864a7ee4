"""Choosing prompts with trained models: rollouts to a target in three ways.

    nice python tests/benchmarks/bench_selection.py NUMBERS.json [--seeds 5] [--task spread]

The tasks sort digits.  Each has 200 prompts, which are all trained and all measured, and a model that was
warmed up until the prompts are of all difficulties, mostly solved, or mostly hopeless.  ``uniform`` draws
prompts alike, ``dynamic`` filters groups with equal rewards besides, and ``learnable`` does both and chooses
prompts by ``learnable_prompts``.  A rollout counts when it is sent to the engine, filtered or not.  All runs
of a task end after the same number of rollouts.

Half an hour to an hour on two cores.  Prints a line for each run, which is kept in NUMBERS.json as it ends,
and a table; a second call goes on where the first was interrupted.  A change of the settings below starts it
anew.  Tasks, targets and settings were chosen with seeds 100 and 101, which are not counted.
``docs/selection.json`` has the numbers of docs/samplers.md, which ``docs/_selection.py`` writes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

import grpo_core as grpo

GRPO = Path(sys.executable).with_name("grpo-core")
GROUP, DEMONSTRATIONS = 8, 5000
WINDOW = 3
"""Measurements in a row whose mean counts: a single one has 400 rollouts."""
SETTINGS: Mapping[str, str] = {
    "tasks.digits.env": f"{Path(__file__).resolve()}:Digits",
    "rollout.group_size": str(GROUP),
    "rollout.max_tokens": "12",
    "trainer.steps": "2000",
    "trainer.prompts_per_step": "8",
    "trainer.lr": "3e-4",
    "trainer.max_grad_norm": "0.5",
    "trainer.proximal": "generation",
    "trainer.threads": "1",
    "engine.threads": "1",
    "validation.name": "batched",
    "validation.options": "{ temperature = 1.0, n = 2 }",
    "checkpoint.every": "0",
    "tracking.trackers": '["files"]',
    "tracking.files.every": "100000",
}
ARMS: Mapping[str, Mapping[str, str]] = {
    "uniform": {"sampler.name": "mix", "validation.every": "8"},
    "dynamic": {"sampler.name": "mix", "dynamic_sampling.enabled": "true", "validation.every": "4"},
    "learnable": {
        "sampler.name": "learnable_prompts",
        "dynamic_sampling.enabled": "true",
        "validation.every": "4",
    },
}
"""Settings of each arm.  A step with filtered groups is measured twice as often: it has more rollouts."""


@attrs.frozen
class Task:
    """Prompts and a model, and what is asked of it."""

    prompts: Mapping[int, int]
    """Number of prompts with so many digits."""
    warmed: Sequence[int]
    """Lengths that the warm start demonstrates, on other digits."""
    warm_start_steps: int
    target: float
    rollouts: int
    """Rollouts after which a run ends."""


TASKS: Mapping[str, Task] = {
    "spread": Task(dict.fromkeys(range(2, 10), 25), range(1, 9), 90, 0.62, 14_000),
    "mostly solved": Task({2: 80, 3: 80, 7: 20, 8: 20}, (1, 2, 2, 2, 3, 3, 3, 5, 6), 240, 0.90, 16_000),
    "mostly hopeless": Task({3: 25, 4: 25, 9: 75, 10: 75}, range(1, 6), 60, 0.17, 14_000),
}


class Digits(grpo.Environment):
    """Sort digits: ``52341=`` is ``12345``.

    Args:
        prompts: number of prompts with so many digits.
    """

    success = 1.0

    def __init__(self, prompts: dict[str, int]) -> None:
        chance = random.Random("selection")
        self._prompts = [
            grpo.Prompt(messages=f"{text}=", answer="".join(sorted(text)), id=text)
            for length, n in prompts.items()
            for text in (f"{number:0{length}}" for number in chance.sample(range(10 ** int(length)), n))
        ]

    def prompts(self, split: str) -> Sequence[grpo.Prompt]:
        return self._prompts

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        return [
            grpo.Feedback(reward=right, metrics={f"digits_{len(episode.prompt.answer)}": right})
            for episode in episodes
            for right in (float(episode.reply.strip() == episode.prompt.answer),)
        ]


def make_model(task: Task, seed: int, directory: Path) -> None:
    """Make the model that all arms of a seed start from."""
    from grpo_core.demo.tiny import make_tiny_model

    chance = random.Random(f"demonstrations/{seed}")
    shown = [
        "".join(chance.choices("0123456789", k=chance.choice(task.warmed))) for _ in range(DEMONSTRATIONS)
    ]
    make_tiny_model(
        directory,
        [(f"{text}=", "".join(sorted(text))) for text in shown],
        warm_start_steps=task.warm_start_steps,
        seed=seed,
    )


def trained(task: Task, arm: str, seed: int, model: Path) -> dict[str, Any]:
    """Train, and return the curve of a run: rollouts and accuracy at each validation."""
    counts = ", ".join(f"{length} = {n}" for length, n in task.prompts.items())
    settings = {
        **SETTINGS,
        **ARMS[arm],
        "seed": str(seed),
        "model.path": str(model),
        "tasks.digits.options": f"{{ prompts = {{ {counts} }} }}",
        "trainer.stop_when": f"buffer/dispatched >= {task.rollouts // GROUP}",
    }
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        done = subprocess.run(
            [GRPO, "train", "--output", run, *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{arm}, seed {seed}: {done.stderr[-500:]}")
        return curve([json.loads(line) for line in (run / "metrics.jsonl").open()])


def curve(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rollouts that were generated until each validation, and its accuracy."""
    sent = {row["step"]: int(row["buffer/dispatched"]) * GROUP for row in rows if "buffer/dispatched" in row}
    found = {
        sent.get(row["step"], 0): round(row["validation/digits/accuracy"], 4)
        for row in rows
        if "validation/digits/accuracy" in row
    }
    return {"rollouts": list(found), "accuracy": list(found.values())}


def smooth(run: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Return rollouts and accuracy at each measurement: the mean accuracy of it and the two before it."""
    accuracy = run["accuracy"]
    means = [statistics.fmean(accuracy[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(accuracy))]
    return list(zip(run["rollouts"], means, strict=True))


def reached(run: Mapping[str, Any], target: float) -> float | None:
    """Return the rollouts until the accuracy has reached the target, by a straight line; None: never."""
    before = (0.0, 0.0)
    for after in smooth(run):
        if after[1] >= target:
            share = (target - before[1]) / (after[1] - before[1])
            return before[0] + share * (after[0] - before[0])
        before = after
    return None


def final(run: Mapping[str, Any]) -> float:
    """Return the accuracy in the end."""
    return smooth(run)[-1][1]


def settings() -> dict[str, Any]:
    """Return all that decides a run, as JSON values."""
    shared = {key: value for key, value in SETTINGS.items() if key != "tasks.digits.env"}
    tasks = {name: attrs.asdict(task) for name, task in TASKS.items()}
    everything = {"common": shared, "arms": ARMS, "tasks": tasks}
    found: dict[str, Any] = json.loads(json.dumps(everything, default=list))
    return found


def measure(numbers: Path, tasks: Sequence[str], seeds: Sequence[int]) -> dict[str, Any]:
    """Train what is not known yet, and keep each run as it ends."""
    known: dict[str, Any] = json.loads(numbers.read_text()) if numbers.exists() else {}
    if known.get("settings") != settings():
        known = {"settings": settings(), "runs": {}}
    for seed, name in itertools.product(seeds, tasks):
        task = TASKS[name]
        missing = [arm for arm in ARMS if f"{name}/{arm}/{seed}" not in known["runs"]]
        with tempfile.TemporaryDirectory() as scratch:
            model = Path(scratch) / "model"
            if missing:
                make_model(task, seed, model)
            for arm in missing:
                begin = time.perf_counter()
                run = trained(task, arm, seed, model)
                known["runs"][f"{name}/{arm}/{seed}"] = run
                numbers.write_text(json.dumps(known) + "\n")
                n = reached(run, task.target)
                when = "never" if n is None else f"after {n:,.0f} rollouts"
                seconds = time.perf_counter() - begin
                print(
                    f"{name}, {arm}, seed {seed}: {task.target:.0%} {when}, "
                    f"in the end {final(run):.1%} ({seconds:.0f} s)",
                    flush=True,
                )
    return known


def summary(runs: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return rollouts to the target and final accuracies by arm, of the seeds that all arms have."""
    by_arm = {
        arm: {int(key.split("/")[2]) for key in runs if key.startswith(f"{name}/{arm}/")} for arm in ARMS
    }
    seeds = sorted(set.intersection(*by_arm.values()))
    task = TASKS[name]
    found: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        own = [runs[f"{name}/{arm}/{seed}"] for seed in seeds]
        found[arm] = {
            "seeds": seeds,
            "rollouts": [reached(run, task.target) for run in own],
            "final": [final(run) for run in own],
        }
    return found


def middle(rollouts: Sequence[float | None], most: int) -> float:
    """Return the median; a run that never reached the target counts with all its rollouts."""
    return statistics.median(most if n is None else n for n in rollouts)


def table(runs: Mapping[str, Any]) -> Iterator[str]:
    """A line for each task and arm."""
    for name, task in TASKS.items():
        arms = summary(runs, name)
        for arm, found in arms.items():
            if not found["seeds"]:
                continue
            each = ", ".join("never" if n is None else f"{n:,.0f}" for n in found["rollouts"])
            yield (
                f"{name:<16} {arm:<10} rollouts to {task.target:.0%}: median "
                f"{middle(found['rollouts'], task.rollouts):,.0f} ({each}); "
                f"accuracy after {task.rollouts:,}: {statistics.fmean(found['final']):.1%}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("numbers", type=Path)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0")
    parser.add_argument("--seed", type=int, help="this seed only")
    parser.add_argument("--task", choices=list(TASKS), action="append")
    given = parser.parse_args()
    seeds = range(given.seeds) if given.seed is None else [given.seed]
    print("\n".join(table(measure(given.numbers, given.task or list(TASKS), seeds)["runs"])))


if __name__ == "__main__":
    main()
