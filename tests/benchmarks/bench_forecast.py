"""Forecasts of `grpo-core simulate` against 20 real runs whose service times were measured in the same run.

    python tests/benchmarks/bench_forecast.py [--keep DIRECTORY] [--seed SEED]

Each run has other settings.  Its service times are read from its own files; a forecast with them and with its
settings should take as many seconds per step.  A load of the machine that stays the same changes little.
With --keep, runs that DIRECTORY already has are not made again.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import NormalDist, fmean, median, pstdev
from typing import Any

import numpy as np

from grpo_core.api.run import Run
from grpo_core.app import launch
from grpo_core.config import read_toml, structured
from grpo_plugin_replay.forecast import WARM_UP, for_steps, forecast
from grpo_plugin_replay.times import Times

GRPO = Path(sys.executable).with_name("grpo-core")
STEPS, SEEDS, LIMIT = 20, 4, 0.08
ENVIRONMENT = """
import time
import grpo_core as grpo

class Letters(grpo.Environment):
    max_turns = 3
    def __init__(self, turns: int = 1, seconds: float = 0.0):
        self.turns, self.seconds = turns, seconds
    def prompts(self, split):
        return [grpo.Prompt(messages=f"t{i}=") for i in range(200)]
    def evaluate(self, episodes):
        time.sleep(self.seconds)
        return [self.judged(episode) for episode in episodes]
    def judged(self, episode):
        if episode.turn + 1 < self.turns and episode.finish_reason == "stop":
            return grpo.Feedback(done=False, messages="go=")
        return grpo.Feedback(reward=float(sum(map(ord, episode.reply)) % 2))
"""
BASE: dict[str, object] = {
    "tasks.letters.env": "./letters.py:Letters", "trainer.steps": STEPS, "trainer.prompts_per_step": 16,
    "rollout.group_size": 4, "rollout.max_tokens": 100, "pipeline.max_staleness": 1, "validation.every": 0,
    "checkpoint.every": 0, "model.options.warm_start_steps": 0, "trainer.threads": 1, "engine.threads": 1,
}  # fmt: skip
STALENESS, PROMPTS, GROUP = "pipeline.max_staleness", "trainer.prompts_per_step", "rollout.group_size"
LENGTH, UPDATES, ENGINES = "rollout.max_tokens", "trainer.updates_per_step", "engine.workers"
TURNS, SECONDS = "tasks.letters.options.turns", "tasks.letters.options.seconds"
SETTINGS: list[dict[str, object]] = [
    {}, {STALENESS: 0}, {STALENESS: 2}, {STALENESS: 4}, {PROMPTS: 6}, {PROMPTS: 6, STALENESS: 0},
    {PROMPTS: 32}, {GROUP: 8}, {GROUP: 2, STALENESS: 2}, {LENGTH: 32}, {LENGTH: 200},
    {LENGTH: 200, STALENESS: 0},
    {UPDATES: 4}, {UPDATES: 4, STALENESS: 0}, {ENGINES: 2}, {ENGINES: 2, STALENESS: 0}, {TURNS: 3},
    {TURNS: 3, STALENESS: 0}, {SECONDS: 0.3}, {"pipeline.policy": "in_order", STALENESS: 2},
]  # fmt: skip


def made(cwd: Path, number: int, settings: dict[str, object]) -> Path:
    """Train with these settings, unless the run is there; return its directory."""
    run = cwd / f"run-{number}"
    if not run.exists():
        sets = [part for each in (BASE | settings).items() for part in ("--set", "{}={}".format(*each))]
        command = [GRPO, "train", "--quiet", *sets, "--output", run.name]
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stdout + done.stderr)
    return run


def measured(run: Path) -> tuple[Times, float]:
    """Return the service times of a run, as its files have them, and its seconds per step.

    A group takes ``turns * turn + tokens * token`` seconds from its dispatch to its end, without weight
    syncs, where its longest rollout has so many turns and tokens: both times are fitted by least squares.
    """
    record = Run(run)
    spans = [span for span in record.timeline() if span["step"] > WARM_UP]
    begins = {slot["slot"]: event["time"] for event in record.events("Dispatched") for slot in event["slots"]}
    ends = {event["slot"]: event["time"] for event in record.events("GroupFinished")}
    groups: dict[int, list[Mapping[str, Any]]] = {}
    for step, file in record.texts().items():
        for row in record.rows(file) if step > WARM_UP else ():
            groups.setdefault(row["slot"], []).append(row)
    rows = [row for group in groups.values() for row in group]

    def seconds(lane: str, what: str) -> list[float]:
        return [span["seconds"] for span in spans if span["lane"] == lane and span["what"] == what]

    syncs = [span for span in spans if span["what"] == "update weights"]
    took, longest = {}, {}
    for slot in groups:
        begin, end = begins[slot], ends[slot]
        paused = (max(0.0, min(end, sync["end"]) - max(begin, sync["begin"])) for sync in syncs)
        took[slot] = end - begin - sum(paused)
        longest[slot] = max(groups[slot], key=lambda row: row["tokens"])
    columns = np.array([[float(row["turns"]), row["tokens"]] for row in longest.values()])
    turn, token = non_negative(columns, np.array([*took.values()]))
    lengths = [tokens for row in rows for tokens in row["turn_tokens"]]
    tokens, spread = censored(lengths, read_toml(run / "config.toml")["rollout"]["max_tokens"])
    training = seconds("trainer", "step")
    found = {
        "engine": {
            "token": max(token, 1e-6),
            "sync": fmean(seconds("sync", "update weights")),
            "canary": fmean(seconds("sync", "canary")),
        },
        "rollout": {
            "tokens": tokens,
            "spread": spread,
            "turns": max(row["turns"] for row in rows),
            "pass_rate": fmean(row["reward"] for row in rows),
        },
        "environment": {"turn": turn},
        "trainer": {
            "step": fmean(training),
            "spread": pstdev(training) / fmean(training),
            "publish": fmean(seconds("trainer", "publish")),
        },
    }
    metrics = [row["time/step"] for row in record.metrics() if "time/step" in row]
    return structured(Times, found), fmean(metrics[WARM_UP:])


def non_negative(columns: Any, values: Any) -> tuple[float, float]:
    """Return two factors, none of them negative, whose sum of columns is nearest to the values."""
    both = np.linalg.lstsq(columns, values, rcond=None)[0]
    if (both < 0).any():
        first, second = (columns.T @ values) / (columns**2).sum(axis=0)
        both = (0.0, second) if both[0] < 0 else (first, 0.0)
    return float(both[0]), float(both[1])


def censored(lengths: list[int], limit: int) -> tuple[float, float]:
    """Return the mean and the spread of lengths before a limit cut them off, if they are log-normal."""
    cut = fmean(length >= limit for length in lengths)
    if not 0 < cut < 1:
        return fmean(lengths), pstdev(lengths) / fmean(lengths)
    normal, low, high = NormalDist(), 0.01, 5.0
    for _ in range(50):
        sigma = (low + high) / 2
        at = normal.inv_cdf(1 - cut)
        mu = math.log(limit) - sigma * at
        mean = math.exp(mu + sigma**2 / 2) * normal.cdf(at - sigma) + limit * cut
        low, high = (sigma, high) if mean > fmean(lengths) else (low, sigma)
    return math.exp(mu + sigma**2 / 2), math.sqrt(math.expm1(sigma**2))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--keep", type=Path, help="directory of the runs")
    parser.add_argument("--seed", type=int, default=0, help="of the runs")
    given = parser.parse_args()
    errors = []
    with tempfile.TemporaryDirectory() as scratch:
        cwd = given.keep or Path(scratch)
        cwd.mkdir(exist_ok=True)
        (cwd / "letters.py").write_text(ENVIRONMENT)
        for number, settings in enumerate(SETTINGS):
            run = made(cwd, number, settings | {"seed": given.seed})
            times, took = measured(run)
            config, host = launch.configure([read_toml(run / "config.toml")], {}, [])
            found = fmean(
                forecast(for_steps(config, STEPS), times, host, seed=seed).seconds_per_step
                for seed in range(SEEDS)
            )
            errors.append(abs(found / took - 1))
            name = " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())
            print(
                f"{name or 'base':40} forecast {found:6.3f}  run {took:6.3f}  {found / took - 1:+.1%}",
                flush=True,
            )
    error = median(errors)
    feedback = "ok" if error <= LIMIT else "MISSED"
    print(f"{'median error of the seconds per step':60} {error:8.3f} {LIMIT:8.3f}  {feedback}")
    return int(error > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
