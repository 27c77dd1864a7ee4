"""Are the laws awake?  Deliberate faults in our own code are found; all of them in bench_mutants."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_spec = importlib.util.spec_from_file_location(
    "bench_mutants", Path(__file__).parent / "benchmarks" / "bench_mutants.py"
)
mutants = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(mutants)

SOME = [
    "in-flight prompts are not saved",
    "permits are free before the engine holds the weights",
    "a lost wake-up",
    "kept rollouts count twice",
    "a reward that is not a number is accepted",
    "the loaders' states are not restored",
]


@pytest.mark.parametrize("mutant", mutants.load(), ids=lambda mutant: mutant["name"])
def test_the_mutants_follow_the_source(mutant):
    mutants.mutated(mutant)


def test_a_mutant_whose_text_is_gone_says_so():
    with pytest.raises(SystemExit, match=r"'x': its text occurs 0 times in grpo_core/buffer\.py"):
        mutants.mutated({"name": "x", "file": "buffer.py", "old": "no such text", "new": ""})


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [m for m in mutants.load() if m["name"] in SOME], ids=lambda m: m["name"])
def test_a_mutant_is_killed(mutant):
    assert mutants.killer(mutant, seeds=range(50))


@pytest.mark.slow
def test_without_a_fault_nothing_is_found():
    """Or the mutants above would die of something else."""
    assert mutants.killer(mutants.NOTHING, seeds=range(50), tests=()) is None
