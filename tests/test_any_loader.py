"""Any dataloader resumes exactly, or is refused before step 1.

A process draws two epochs through the real loader, sampler, buffer and checkpoint, and is killed three times
at random moments.  It draws what a process draws that nobody kills.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import forks
import pytest
from any_loaders import FACTORIES
from drawing import PER_STEP, PHASES
from indexed_rows import N

TESTS = Path(__file__).parent
STEPS = 2 * N // PER_STEP + 2
REFUSED = {
    "duckdb_batches",
    "generator",
    "litdata_rows",
    "own_state_that_is_wrong",
    "polars_iterator",
    "pyarrow_batches",
    "sqlite_cursor",
    "stateful_shuffled_without_generator",
    "torch_loader",
}
"""Loaders without a position, with a wrong one, or with rows that come twice; the others are exact."""
QUICK = {
    "datasets_iterable",
    "generator",
    "list_of_rows",
    "nodes_of_an_iterable",
    "own_state",
    "sqlite_by_number",
    "stateful_shuffled",
    "webdataset",
}
WITHOUT = {name: name for name in ("webdataset", "duckdb", "polars", "pandas", "litdata")}
"""Packages that a loader needs and the project does not, by the beginning of its name."""


def run(name: str, folder: Path, *kill: object) -> subprocess.CompletedProcess[str]:
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "drawing.py", name, str(folder), str(STEPS), *map(str, kill)]
    code = "del sys.argv[0]; sys.modules['drawing'].main()"
    return forks.run("drawing", code, words, TESTS, os.environ, 280)


def drawn(folder: Path) -> dict[int, list[str]]:
    """Texts of the prompts of each step; of a step that was drawn twice, the last time counts."""
    lines = (folder / "drawn.jsonl").read_text().splitlines()
    return dict(json.loads(line) for line in lines)


def moments(name: str) -> list[tuple[int, str]]:
    """Three random moments: in the first epoch, in the second, and anywhere."""
    chance, half = random.Random(name), STEPS // 2
    ranges = [(2, half), (half, STEPS - 1), (2, STEPS - 1)]
    chosen = [(chance.randrange(*each), chance.choice(PHASES)) for each in ranges]
    return sorted((step | (phase == "saving"), phase) for step, phase in chosen)  # odd steps end with a save


@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.nightly) for name in FACTORIES]
)
def test_a_loader_resumes_exactly_or_is_refused_before_the_first_step(name, tmp_path):
    for beginning, package in WITHOUT.items():
        if name.startswith(beginning):
            pytest.importorskip(package)
    calm = run(name, tmp_path / "calm")
    if name in REFUSED:
        assert calm.returncode == 2, calm.stderr
        assert not (tmp_path / "calm" / "drawn.jsonl").exists()
        assert calm.stderr.count("\n") == 1, "one line"
        return
    assert calm.returncode == 0, calm.stderr
    expected = drawn(tmp_path / "calm")
    assert sorted(expected) == list(range(STEPS))
    folder = tmp_path / "killed"
    for moment in moments(name):
        killed = run(name, folder, *moment)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    ended = run(name, folder)
    assert ended.returncode == 0, ended.stderr
    assert drawn(folder) == expected
