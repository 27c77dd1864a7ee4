"""Are the laws awake?  Each deliberate fault of tests/mutants.toml must be found.

    python tests/benchmarks/bench_mutants.py [NAME ...] [--seeds 500] [--first-seed 0]

A mutant is a copy of the package with one function edited.  It is killed by the first seed of the simulation
whose laws break (or that hangs), or else by the tests of the buffer, the pipeline and their neighbours, the
quick ones first.  If its law is "tests", the simulation comes last.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from mutation import EditError, edited

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "grpo_core"
SEEDS = range(500)
TESTS = [
    "aio",
    "buffer",
    "pipeline",
    "hints",
    "kept_work",
    "saves",
    "rollout",
    "turns",
    "checkpoint",
    "power_cut",
    "samplers",
    "loaders",
    "positions",
    "dispatcher",
    "quotas",
    "learnable_prompts",
    "agent_sessions",
    "simulated_agents",
    "control",
    "text_of_replies",
]
PATIENCE = 5.0
"""Times as long as without a mutant, or it hangs."""
NO_TESTS = 5
"""Exit status of pytest if its marks select nothing."""
NOTHING: dict[str, Any] = {"name": "nothing", "file": "loop/buffer.py"}
"""No fault: if this is killed, so would be any mutant."""


def load() -> list[dict[str, Any]]:
    return tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["mutant"]


def package_of(mutant: dict[str, Any]) -> tuple[Path, str]:
    """Return the package that has the mutant's file, and the file's path in it."""
    first, _, inside = mutant["file"].partition("/")
    if first.startswith("grpo_plugin_"):
        return ROOT / "plugins" / first.replace("_", "-") / first, inside
    return PACKAGE, mutant["file"]


def source_of(mutant: dict[str, Any]) -> str:
    return Path(*package_of(mutant)).read_text()


def mutated(mutant: dict[str, Any]) -> str:
    """Raises SystemExit if an edit does not apply exactly once: the list has to follow the source."""
    edits = [mutant, *mutant.get("also", ())] if "old" in mutant else []
    try:
        return edited(source_of(mutant), edits)
    except (EditError, FileNotFoundError) as error:
        raise SystemExit(
            f"mutant {mutant['name']!r} in {mutant['file']}: {error}\nAdapt tests/mutants.toml."
        ) from None


def killer(
    mutant: dict[str, Any], seeds: range = SEEDS, tests: Sequence[str] = TESTS, seconds: float = 600.0
) -> str | None:
    """Name what killed the mutant; None if it survives.  They hang after ``seconds``."""
    with tempfile.TemporaryDirectory() as scratch:
        package, inside = package_of(mutant)
        shutil.copytree(package, Path(scratch) / package.name)
        (Path(scratch) / package.name / inside).write_text(mutated(mutant))
        environ = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([scratch, str(ROOT / "tests")]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        simulation = [sys.executable, "-m", "simulation.runs", "--quiet"]
        simulation += ["--seed", str(seeds.start), "--seeds", str(len(seeds))]
        pytest = [sys.executable, "-m", "pytest", "-qx", "-p", "no:cacheprovider"]
        files = [
            str(path)
            for name in tests
            for path in (*ROOT.glob(f"tests/test_{name}.py"), *ROOT.glob(f"plugins/*/tests/test_{name}.py"))
        ]
        tested = [
            ("tests: ", [*pytest, "-m", f"{which} and not slow and not nightly", *files])
            for which in ("not long", "long")
            if files
        ]
        simulated = [("", simulation)]
        in_turn = [*tested, *simulated] if mutant.get("law") == "tests" else [*simulated, *tested]
        for of, command in in_turn:
            if (said := _fails(command, scratch, environ, seconds)) is not None:
                return of + said
    return None


def _fails(command: list[str], cwd: str, environ: dict[str, str], seconds: float) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=cwd, env=environ, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        return f"hangs for {seconds:.0f} s"
    lines = (done.stdout + done.stderr).strip().splitlines()
    found = [line for line in lines if line.startswith(("seed", "FAILED"))]
    return None if done.returncode in (0, NO_TESTS) else (found or lines or ["?"])[0][:150]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these mutants")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="so many simulations for each")
    parser.add_argument("--first-seed", type=int, default=0)
    given = parser.parse_args()
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    if unknown := set(given.names) - {mutant["name"] for mutant in load()}:
        raise SystemExit(f"tests/mutants.toml has no mutant {', '.join(map(repr, sorted(unknown)))}")
    mutants = [mutant for mutant in load() if not given.names or mutant["name"] in given.names]
    for mutant in mutants:
        mutated(mutant)
    began = time.perf_counter()
    if (found := killer(NOTHING, seeds)) is not None:
        raise SystemExit(f"without any mutant there is a violation already, or a test fails: {found}")
    seconds = PATIENCE * (time.perf_counter() - began)
    print(f"without a mutant: nothing found; one that takes more than {seconds:.0f} s hangs", flush=True)
    killers = []
    kill = partial(killer, seeds=seeds, seconds=seconds)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutant, by in zip(mutants, pool.map(kill, mutants), strict=True):
            killers.append(by)
            place = f"{len(killers)}/{len(mutants)} {mutant['file']}: {mutant['name']}"
            print(f"{'killed  ' if by else 'SURVIVES'}  {place}\n          {by}", flush=True)
    survivors = killers.count(None)
    print(f"{'mutants killed, of ' + str(len(mutants)):60} {len(mutants) - survivors:10}  == {len(mutants)}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
