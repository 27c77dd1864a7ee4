"""Time travel: equal runs are equal, and each step of a run can be computed again from its files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

GRPO = Path(sys.executable).with_name("grpo-core")
REPRODUCIBLE = {
    "seed": 5, "pipeline.policy": "in_order", "pipeline.in_flight_updates": "false",
    "trainer.threads": 1, "engine.threads": 1,
}  # fmt: skip
SMALL = {
    "trainer.steps": 4, "trainer.prompts_per_step": 3, "rollout.group_size": 3, "rollout.max_tokens": 8,
    "validation.every": 0, "model.options.warm_start_steps": 3, "model.options.width": 32,
}  # fmt: skip


def train(directory, name, *arguments, **settings):
    """Train a small run in a process of its own; return its directory."""
    given = REPRODUCIBLE | SMALL | {key.replace("__", "."): value for key, value in settings.items()}
    sets = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
    command = [GRPO, "train", "--env", "math:sort", *arguments, *sets, "--output", name]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return directory / name


def arrays(run, pattern):
    return {
        f"{path.relative_to(run)}: {name}": value.tobytes()
        for path in sorted(run.glob(pattern))
        for name, value in load_file(path).items()
    }


@pytest.mark.long
def test_two_runs_with_the_same_seed_have_the_same_weights_to_the_last_bit(tmp_path):
    """Their groups are generated while a step trains, so they reach the engine at other moments each time."""
    first, second = (train(tmp_path, name) for name in ("first", "second"))
    for pattern in ("rollouts/*.safetensors", "checkpoints/**/*.safetensors"):
        assert arrays(first, pattern) == arrays(second, pattern)
        assert arrays(first, pattern)
