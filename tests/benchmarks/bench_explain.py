"""How often ``grpo-core explain`` names the right cause, on simulated runs with a known one.

    python tests/benchmarks/bench_explain.py 25 --output explain.json

Each cause of ``simulation.broken`` is brought about in so many runs with held-out seeds, from 20,000 on.  The
rules were written on seeds below 100, and two thresholds on healthy runs from 10,000 on.  A run is recorded
by the real pipeline on virtual time, read from its directory, and removed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from simulation.broken import BREAKS, CAUSES, write

from grpo_core import Run
from grpo_plugin_report.explain.decisions import explained
from grpo_plugin_report.explain.facts import Facts

HELD_OUT = 20_000
"""The first held-out seed."""
HEALTHY = "healthy"


def diagnose(job: tuple[str, int]) -> tuple[str, list[str], float]:
    """Record a run, and return its cause, the causes that are named, and the seconds of the diagnosis."""
    cause, seed = job
    torch.set_num_threads(1)
    memory = Path("/dev/shm")
    scratch = Path(tempfile.mkdtemp(prefix="grpo-core-", dir=memory if memory.is_dir() else None))
    try:
        write(scratch / "run", cause, seed)
        began = time.perf_counter()
        found = [finding.cause for finding in explained(Facts.read(Run(scratch / "run", strict=False)))]
        took = time.perf_counter() - began
        return cause, [cause if name == CAUSES.get(cause) else name for name in found], took
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def main() -> int:
    """Print the figures; return 1 if a limit is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seeds", type=int, nargs="?", default=25, help="number of runs of each cause")
    parser.add_argument("--first", type=int, default=HELD_OUT, help="the first seed")
    parser.add_argument("--healthy", type=int, help="number of healthy runs; default: 8 times the seeds")
    parser.add_argument("--causes", nargs="*", choices=[*BREAKS], default=[*BREAKS])
    parser.add_argument("--output", type=Path, help="file for the figures")
    given = parser.parse_args()
    healthy = 8 * given.seeds if given.healthy is None else given.healthy
    jobs = [(cause, given.first + i) for i in range(given.seeds) for cause in given.causes]
    jobs += [(HEALTHY, given.first + i) for i in range(healthy)]
    named: dict[str, Counter[str]] = defaultdict(Counter)
    among: Counter[str] = Counter()
    slowest = 0.0
    with ProcessPoolExecutor(2) as pool:
        for cause, found, seconds in pool.map(diagnose, jobs, chunksize=4):
            named[cause][found[0] if found else HEALTHY] += 1
            among[cause] += cause in found[:3]
            slowest = max(slowest, seconds)
    return told(named, among, slowest, given.output)


def told(named: dict[str, Counter[str]], among: Counter[str], slowest: float, output: Path | None) -> int:
    """Print the figures by cause and over all causes; return 1 if a limit is missed."""
    false = named.pop(HEALTHY, Counter())
    for cause, counts in named.items():
        others = ", ".join(f"{other} {n}" for other, n in counts.most_common() if other != cause)
        print(f"{cause:32s} {counts[cause]:4d} of {counts.total():4d}  {others}")
    runs = sum(counts.total() for counts in named.values())
    right = sum(counts[cause] for cause, counts in named.items())
    alarms = false.total() - false[HEALTHY]
    print(f"explain/causes                     {len(named)}  limit 30")
    if runs:
        print(f"explain/top-1                      {right / runs:.1%} of {runs} runs  limit 90%")
        print(f"explain/top-3                      {sum(among.values()) / runs:.1%}")
    if false:
        print(
            f"explain/healthy with a cause       {alarms / false.total():.2%} of {false.total()} runs  "
            "limit 1%"
        )
        print(f"                                   {dict(false)}")
    print(f"explain/slowest diagnosis          {slowest:.2f} s")
    if output is not None:
        table = {"named": {cause: dict(counts) for cause, counts in named.items()}, "healthy": dict(false)}
        output.write_text(json.dumps(table | {"top_3": dict(among)}, indent=1, sort_keys=True) + "\n")
    return int(bool(runs and right < 0.9 * runs) or bool(false and alarms > 0.01 * false.total()))


if __name__ == "__main__":
    sys.exit(main())
