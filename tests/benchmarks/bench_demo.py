"""The demo as it is shipped: the share of its longer side in a step, what it learns, and how soon it begins.

    share of the longer side = max(T_generate, T_train) / T_step

T_step is a step's time in an asynchronous run, T_generate and T_train are measured alone: in a synchronous
run of the same configuration, where nothing runs beside them.  Medians over the steps after the first ten.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

GRPO = Path(sys.executable).with_name("grpo-core")
STEPS = 40
ONE_THREAD = ["--set", "trainer.threads=1", "--set", "engine.threads=1"]


def train(directory: Path, *settings: str) -> tuple[list[dict[str, float]], float]:
    """Metrics of the steps, and the seconds from the command to the end of the first of them."""
    began = time.time()
    subprocess.run(
        [GRPO, "train", "--env", "math:sort", "--output", directory, *ONE_THREAD, *settings],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return rows, next(row["time"] for row in rows if "loss" in row) - began


def steady(rows: list[dict[str, float]], name: str) -> float:
    return median([row[name] for row in rows if "loss" in row][10:])


def main() -> None:
    short = ["--set", f"trainer.steps={STEPS}", "--set", "validation.every=0", "--set", "checkpoint.every=0"]
    with tempfile.TemporaryDirectory() as scratch:
        beside, first = train(Path(scratch) / "beside", *short, "--set", "pipeline.max_staleness=1")
        alone, _ = train(Path(scratch) / "alone", *short, "--set", "pipeline.max_staleness=0")
        whole, _ = train(Path(scratch) / "whole")
    step = steady(beside, "time/step")
    generate, learn = steady(alone, "time/generate"), steady(alone, "time/train")
    show("seconds from the command to the first optimizer step", first, 10.0, below=True)
    show("step, synchronous (s)", steady(alone, "time/step"))
    show("step, asynchronous (s)", step)
    show("generation alone (s)", generate)
    show("training alone (s)", learn)
    show("share of the longer side in a step of the demo", max(generate, learn) / step, 0.85)
    accuracies = [
        (r["step"], r["time"], a) for r in whole if (a := r.get("validation/sort/accuracy")) is not None
    ]
    start = next(row["time"] for row in whole if "loss" in row)
    reached = next((t - start for _, t, a in accuracies if a >= 0.9), float("inf"))
    show("seconds of training to 90% validation accuracy", reached, 120.0, below=True)
    show("validation accuracy at the end", accuracies[-1][2], 0.9)


def show(name: str, value: float, limit: float | None = None, *, below: bool = False) -> None:
    feedback = ""
    if limit is not None:
        good = value <= limit if below else value >= limit
        feedback = f"{'<=' if below else '>='} {limit:g}  {'ok' if good else 'short'}"
    print(f"{name:60} {value:10.3f}  {feedback}", flush=True)


if __name__ == "__main__":
    main()
