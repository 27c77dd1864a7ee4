"""Whether a run grows with its age: the demo for an hour, and 20,000 steps of the pipeline on virtual time.

    python tests/benchmarks/bench_hour.py [--hours 1] [--steps 20000] [-- ARGUMENT ...]

ARGUMENTs go to `grpo-core train`.  A thread in each of its processes writes, every two seconds, CPU seconds,
live blocks of Python's allocator, live bytes of malloc, resident bytes, open files and threads.  The least of
each tenth counts, without the first three, in which caches fill: a line through the others says by how much
a process has grown from their begin to their end.  CPU seconds of a step are compared between both ends.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from bench_live_memory import LEFT_OUT, WATCH, least, slope
from bench_simulation import Instant, pipeline, resident

from grpo_core.processes.memory import spare_the_collector
from grpo_core.testing import clock

LIMIT = 0.02
"""Share by which a process may grow from the fourth to the last tenth."""
NAMES = ("live bytes of malloc", "resident bytes", "live blocks", "open files", "threads")
HOUR = (
    WATCH.replace("{name}\\n", "{sys.getallocatedblocks()} {len(os.listdir('/proc/self/fd'))} "
    "{threading.active_count()} {time.process_time()} {name}\\n")
    .replace("sleep(0.125)", "sleep(2)")
)  # fmt: skip


def demo(hours: float, more: list[str], directory: Path) -> int:
    """Train; print a line for each process and figure.  Return how many grew."""
    (directory / "sitecustomize.py").write_text(HOUR)
    (directory / "live").mkdir()
    environ = {**os.environ, "PYTHONPATH": str(directory), "LIVE_MEMORY": str(directory / "live")}
    settings = ["trainer.steps=1000000", f"trainer.time_limit={3600 * hours}"]
    command = [
        sys.executable,
        "-m",
        "grpo_core",
        "train",
        *(more or ["--env", "math:sort"]),
        "--output",
        "run",
    ]
    command += [part for each in settings for part in ("--set", each)]
    with (directory / "said").open("w") as said:
        process = subprocess.Popen(command, cwd=directory, env=environ, stdout=said, stderr=said)
        files = []
        while process.poll() is None:
            files.append((time.time(), sum(len(names) for *_, names in os.walk(directory / "run"))))
            time.sleep(10)
    if process.returncode:
        raise SystemExit((directory / "said").read_text()[-2000:])
    rows = [json.loads(line) for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    times = [row["time"] for row in rows if "rows" in row]  # also steps that train none
    print(f"# {len(times)} steps in {times[-1] - times[0]:.0f} s")
    edges = [times[(len(times) - 1) * tenth // 10] for tenth in range(11)]
    failed, cpu = 0, [0.0] * 10
    for path in sorted((directory / "live").iterdir(), key=lambda path: int(path.name)):
        lines = [line.split(maxsplit=7) for line in path.read_text().splitlines()]
        samples = [(float(line[0]), [*map(float, line[1:7])]) for line in lines]
        if samples[0][0] > edges[1] or samples[-1][0] < edges[-2]:
            continue  # it did not live through the run
        used = [min(samples, key=lambda sample: abs(sample[0] - edge))[1][5] for edge in edges]
        cpu = [a + after - before for a, (before, after) in zip(cpu, itertools.pairwise(used), strict=True)]
        for place, name in enumerate(NAMES):
            series = least([(at, values[place]) for at, values in samples], [times[0], *times])
            failed += grown(f"{lines[-1][7]}, {path.name}: {name}", series)
    print(
        f"{'files of the run at each tenth':60} {[max(n for at, n in files if at <= e + 10) for e in edges]}"
    )
    per_step = [10 * each / len(times) for each in cpu]
    print(f"{'CPU seconds of a step in each tenth':60} {[round(each, 4) for each in per_step]}")
    return failed


def virtual(steps: int) -> int:
    """Play steps of the pipeline; print figures.  Return how many grew."""
    spare_the_collector()
    seen: list[tuple[float, ...]] = []

    def emit(event: object) -> None:
        if type(event).__name__ == "StepEnded" and event.step % (steps // 10) == 0:  # type: ignore[attr-defined]
            gc.collect()
            seen.append((sys.getallocatedblocks(), resident(), time.process_time()))

    main = pipeline(prompts_per_step=4, steps=steps, environment=Instant())
    main.emit = emit
    clock.run(main.run())
    blocks, kilobytes, cpu = zip(*seen, strict=True)
    failed = grown("virtual time: live blocks", [*blocks]) + grown("virtual time: resident KB", [*kilobytes])
    per_step = [(after - before) * 10 / steps for before, after in itertools.pairwise(cpu)]
    print(
        f"{'virtual time: CPU ms of a step in each tenth':60} {[round(each * 1e3, 3) for each in per_step]}"
    )
    return failed


def grown(name: str, tenths: list[float]) -> int:
    """Print by how much a value has grown."""
    share = slope(tenths[LEFT_OUT:]) * (len(tenths) - LEFT_OUT - 1) / max(tenths[LEFT_OUT], 1.0)
    good = share <= LIMIT
    print(
        f"{name:60} {share:10.4f}  <= {LIMIT:g}  {'ok' if good else 'above'}; {[round(t) for t in tenths]}",
        flush=True,
    )
    return int(not good)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hours", type=float, default=1.0)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--keep", type=Path, help="directory for the files of the run")
    parser.add_argument("more", nargs="*")
    given = parser.parse_args()
    failed = virtual(given.steps)
    with tempfile.TemporaryDirectory() as scratch:
        directory = given.keep or Path(scratch)
        directory.mkdir(exist_ok=True)
        return int(failed + demo(given.hours, given.more, directory) > 0)


if __name__ == "__main__":
    sys.exit(main())
