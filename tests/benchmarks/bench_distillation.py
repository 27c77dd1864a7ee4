"""On-policy distillation and GRPO with the same steps: what a small model learns from a larger one.

    python tests/benchmarks/bench_distillation.py [SEEDS]

The teacher is the demo's model (width 64) after 250 steps of GRPO on sorting.  The student has width 48.  It
learns for 100 steps from the teacher without rewards, and for 100 steps from rewards without the teacher.
Accuracies are those of 200 held-out prompts, sampled.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

GRPO = Path(sys.executable).with_name("grpo-core")
LEAST = 0.1
"""Accuracy by which distillation has to be ahead of GRPO."""


def accuracies(directory: Path, *settings: str) -> list[float]:
    """Validation accuracies of a run on sorting."""
    words = [word for setting in settings for word in ("--set", setting)]
    command = [GRPO, "train", "--env", "math:sort", "--output", directory, *words]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [row["validation/sort/accuracy"] for row in rows if "validation/sort/accuracy" in row]


def main() -> None:
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    behind = 0
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        found = accuracies(home / "teacher", "trainer.steps=250", "validation.every=50")
        print(f"teacher: {found[0]:.1%} -> {found[-1]:.1%}")
        taught = ["loss.name=distillation", f"scores.teacher.weights={home / 'teacher'}"]
        for seed in range(seeds):
            student = ["model.options.width=48", "trainer.steps=100", "trainer.lr=1e-3", f"seed={seed}"]
            distilled = accuracies(home / f"distilled-{seed}", *student, *taught)
            rewarded = accuracies(home / f"rewarded-{seed}", *student)
            print(f"seed {seed}: distillation {distilled[0]:.1%} -> {distilled[-1]:.1%}, ", end="")
            print(f"GRPO {rewarded[0]:.1%} -> {rewarded[-1]:.1%}")
            behind += distilled[-1] < rewarded[-1] + LEAST
    sys.exit(bool(behind))


if __name__ == "__main__":
    main()
