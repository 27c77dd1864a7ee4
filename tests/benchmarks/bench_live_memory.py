"""Counts the live memory of a run's trainer and engine over many steps: what malloc has handed out.

    python tests/benchmarks/bench_live_memory.py [--steps 1000] [--device cpu|cuda] [-- ARGUMENT ...]

A run trains from the command line; ARGUMENTs go to `grpo-core train`.  In each of its processes a thread asks
malloc eight times a second for the bytes of all live blocks, which with PYTHONMALLOC=malloc include Python's
objects and torch's tensors on the host.  A step's live memory comes and goes, so the least of each
tenth of the run counts.  The first three tenths are left out: caches fill.  From then on a line through the
tenths may rise by 1 MiB in 100 steps; resident memory, which includes what malloc keeps free, is shown, too.
Prints one line per process: name, MiB in 100 steps, limit, ok or above.  Needs Linux and glibc 2.33.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

MIB = 1 << 20
LIMIT = 1.0
"""MiB of live blocks by which a process may grow in 100 steps."""
PARTS, LEFT_OUT = 10, 3
WATCH = '''
"""Writes the live and the resident bytes of a process of Python, eight times a second."""
import ctypes, os, sys, threading, time

PARTS = {
    "trainer": "grpo_core.training.trainer", "engine local": "grpo_core.engines.local.server",
    "engine vllm": "grpo_plugin_vllm.server", "command": "grpo_core.loop.pipeline",
}

class Info(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks",
        "uordblks", "fordblks", "keepcost")]

def watch():
    ask = ctypes.CDLL(None).mallinfo2
    ask.restype = Info
    with open(f"{os.environ['LIVE_MEMORY']}/{os.getpid()}", "w", buffering=1) as file:
        while True:
            with open("/proc/self/statm") as statm:
                resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
            found = ask()
            name = next((name for name, module in PARTS.items() if module in sys.modules), "other")
            file.write(f"{time.time()} {found.uordblks + found.hblkhd} {resident} {name}\\n")
            time.sleep(0.125)

if "LIVE_MEMORY" in os.environ:
    threading.Thread(target=watch, daemon=True).start()
'''


def slope(values: list[float]) -> float:
    """Return by how much a line through the values rises from one to the next."""
    middle, mean = (len(values) - 1) / 2, sum(values) / len(values)
    spread = sum((place - middle) ** 2 for place in range(len(values)))
    return sum((place - middle) * (value - mean) for place, value in enumerate(values)) / spread


def least(samples: list[tuple[float, float]], times: list[float]) -> list[float]:
    """Return the least value of each tenth of the steps, which ended at ``times``."""
    edges = [times[(len(times) - 1) * part // PARTS] for part in range(PARTS + 1)]
    return [
        min(value for moment, value in samples if begin <= moment <= end)
        for begin, end in itertools.pairwise(edges)
    ]


def measure(steps: int, device: str, more: list[str], directory: Path) -> int:
    (directory / "sitecustomize.py").write_text(WATCH)
    (directory / "live").mkdir()
    settings = {
        "trainer.steps": steps, "trainer.device": device, "engine.options.device": device,
        "trainer.prompts_per_step": 4, "rollout.group_size": 4, "validation.every": 0,
        "pipeline.max_staleness": 1, "checkpoint.every": steps,
    }  # fmt: skip
    chosen = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    more = more if "--env" in more else ["--env", "math:sort", *more]
    paths = [str(directory), *filter(None, [os.environ.get("PYTHONPATH")])]
    environ = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONMALLOC": "malloc",
        "LIVE_MEMORY": str(directory / "live"),
    }  # fmt: skip
    command = [sys.executable, "-m", "grpo_core", "train", *chosen, *more, "--output", "run"]
    done = subprocess.run(command, cwd=directory, env=environ, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"exit status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
        return 1
    events = [json.loads(line) for line in (directory / "run" / "events.jsonl").read_text().splitlines()]
    times = [event["time"] for event in events if event["event"] == "StepEnded"]
    failed = 0
    for path in sorted((directory / "live").iterdir(), key=lambda path: int(path.name)):
        lines = [line.split(maxsplit=3) for line in path.read_text().splitlines()]
        rows = [tuple(map(float, line[:3])) for line in lines]
        if len(rows) < PARTS or rows[0][0] > times[0] or rows[-1][0] < times[-1]:
            continue  # it did not live through the whole run
        live, resident = (least([(row[0], row[i]) for row in rows], times) for i in (1, 2))
        grown, swollen = (
            slope([value / MIB for value in each[LEFT_OUT:]]) * PARTS * 100 / len(times)
            for each in (live, resident)
        )
        failed += grown > LIMIT
        shown = " ".join(f"{value / MIB:.1f}" for value in live)
        print(
            f"{lines[-1][3]:<14} live memory in 100 steps {grown:8.2f} MiB  limit {LIMIT:g}  "
            f"{'ok' if grown <= LIMIT else 'above'}; resident {swollen:.2f}; tenths in MiB: {shown}",
            flush=True,
        )
    return int(failed > 0)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("more", nargs="*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        return measure(given.steps, given.device, given.more, Path(directory))


if __name__ == "__main__":
    sys.exit(main())
