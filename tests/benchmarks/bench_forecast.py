"""Forecasts of `grpo-core simulate` against 20 real runs whose service times were measured in the same run.

    python tests/benchmarks/bench_forecast.py [--keep DIRECTORY]

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


def made(cwd: Path, number: int, settings: Mapping[str, object]) -> Path:
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
    """Return the service times of a run, as its files have them, and its seconds per step."""
    record = Run(run)
    spans = [span for span in record.timeline() if span["step"] > WARM_UP]
    files = [file for step, file in record.texts().items() if step > WARM_UP]
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for file in files:
        for row in record.rows(file):
            groups.setdefault((file, row["group"]), []).append(row)
    rows = [row for group in groups.values() for row in group]

    def chosen(lane: str, what: str) -> list[Mapping[str, Any]]:
        return [span for span in spans if span["lane"] == lane and span["what"] == what]

    def mean(lane: str, what: str) -> float:
        found = chosen(lane, what)
        return sum(span["seconds"] for span in found) / max(1, sum(span["calls"] for span in found))

    lengths = [tokens for row in rows for tokens in row["turn_tokens"]]
    many = any(len(row["turn_tokens"]) > 1 for row in rows)
    longest = fmean(lengths if many else [max(row["tokens"] for row in group) for group in groups.values()])
    generate = chosen("engine", "generate")
    paused = sum(
        max(0.0, min(span["end"], sync["end"]) - max(span["begin"], sync["begin"]))
        * span["seconds"] / max(span["end"] - span["begin"], 1e-9)
        for sync in chosen("sync", "update weights")
        for span in generate
    )  # fmt: skip
    call = (sum(span["seconds"] for span in generate) - paused) / sum(span["calls"] for span in generate)
    steps = [span["seconds"] for span in chosen("trainer", "step")]
    limit = read_toml(run / "config.toml")["rollout"]["max_tokens"]
    tokens, spread = censored(lengths, limit)
    found = {
        "engine": {
            "token": call / longest,
            "sync": mean("sync", "update weights"),
            "canary": mean("sync", "canary"),
        },
        "rollout": {
            "tokens": tokens,
            "spread": spread,
            "turns": max(len(row["turn_tokens"]) for row in rows),
            "prompt_tokens": 8,
            "pass_rate": fmean(row["reward"] for row in rows),
        },
        "environment": {"turn": mean("environment letters", "evaluate")},
        "trainer": {
            "step": fmean(steps),
            "spread": pstdev(steps) / fmean(steps),
            "publish": mean("trainer", "publish"),
        },
    }
    metrics = [row["time/step"] for row in record.metrics() if "time/step" in row]
    return structured(Times, found), fmean(metrics[WARM_UP:])


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
    given = parser.parse_args()
    errors = []
    with tempfile.TemporaryDirectory() as scratch:
        cwd = given.keep or Path(scratch)
        cwd.mkdir(exist_ok=True)
        (cwd / "letters.py").write_text(ENVIRONMENT)
        for number, settings in enumerate(SETTINGS):
            run = made(cwd, number, settings)
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
