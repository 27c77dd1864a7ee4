"""Are the laws awake?  Each deliberate fault of tests/mutants.toml must be found.

    python tests/benchmarks/bench_mutants.py [NAME ...]

A mutant is a copy of the package with one text replaced.  It is killed by the first seed of the simulation
whose laws break (or that hangs), or else by the tests of the buffer, the pipeline and their neighbours.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "grpo_core"
SEEDS = 500
TESTS = ["buffer", "pipeline", "rollout", "checkpoint", "samplers", "loaders", "batcher"]
SECONDS = 120


def load() -> list[dict]:
    return tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["mutant"]


def mutated(mutant: dict) -> str:
    """Raises SystemExit if the text is not there, or more than once: the list has to follow the source."""
    text = (PACKAGE / mutant["file"]).read_text()
    for change in (mutant, *mutant.get("also", ())):
        count = text.count(change["old"])
        if count != 1:
            raise SystemExit(
                f"mutant {mutant['name']!r}: its text occurs {count} times in grpo_core/{mutant['file']}, "
                f"expected once; adapt tests/mutants.toml:\n{change['old']}"
            )
        text = text.replace(change["old"], change["new"])
    return text


def killer(mutant: dict, seeds: int = SEEDS, tests: Sequence[str] = TESTS) -> str | None:
    """What killed the mutant; None if it survives."""
    with tempfile.TemporaryDirectory() as scratch:
        shutil.copytree(PACKAGE, Path(scratch) / "grpo_core")
        (Path(scratch) / "grpo_core" / mutant["file"]).write_text(mutated(mutant))
        environ = {**os.environ, "PYTHONPATH": scratch, "PYTHONDONTWRITEBYTECODE": "1"}
        simulation = [sys.executable, "-m", "grpo_core.testing.simulation", "--quiet", "--seeds", str(seeds)]
        if (said := _fails(simulation, scratch, environ)) is not None:
            return said
        if not tests:
            return None
        files = [str(ROOT / "tests" / f"test_{name}.py") for name in tests]
        pytest = [sys.executable, "-m", "pytest", "-qx", "-m", "not slow", "-p", "no:cacheprovider", *files]
        said = _fails(pytest, scratch, environ)
        return None if said is None else f"tests: {said}"


def _fails(command: list[str], cwd: str, environ: dict[str, str]) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"hangs for {SECONDS} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    found = [line for line in lines if line.startswith(("seed", "FAILED"))]
    return None if done.returncode == 0 else (found or lines or ["?"])[0][:150]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these mutants")
    names = set(parser.parse_args().names)
    mutants = [mutant for mutant in load() if not names or mutant["name"] in names]
    for mutant in mutants:
        mutated(mutant)
    killers = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, by in zip(mutants, pool.map(killer, mutants), strict=True):
            print(
                f"{'killed  ' if by else 'SURVIVES'}  {mutant['file']}: {mutant['name']}\n          {by}",
                flush=True,
            )
            killers.append(by)
    survivors = killers.count(None)
    print(f"{'mutants killed, of ' + str(len(mutants)):60} {len(mutants) - survivors:10}  == {len(mutants)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
