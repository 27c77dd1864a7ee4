"""SIGKILL at random moments of a run's processes, resumed each time; and how soon it trains again.

    python tests/benchmarks/bench_kill.py 200 [seed]

A run whose engine or environment was killed must go on; after any other death it must leave no process and no
shared memory, and continue with --resume.  In the end every prompt was trained once an epoch or recorded as
skipped.  Recovery is the time from the moment when a resumed run has its processes and its checkpoint (the
first dispatch, or groups that were ready) to its next optimizer step, in latencies of a group.  These are
mostly the tenth of a second that feedback takes: more than a step of training, as where recovery matters.
Exits with an error at the first violation, and names the seed.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
from killing import Run, check_accounting, left_after

TARGETS = ["engine", "environment", "trainer", "main", "all"]
VERDICT = 0.1
"""Seconds."""
LONGEST = 7.0
"""Seconds after a start, or after the last kill, that a moment lies at most."""


def main() -> int:
    given = [int(argument) for argument in sys.argv[1:] if argument.isdigit()]
    moments, seed = (*given, *[20, 0][len(given) :])
    chance = random.Random(seed)
    killed: Counter[str] = Counter()
    runs, recoveries = 0, []
    while killed.total() < moments:
        with tempfile.TemporaryDirectory() as scratch:
            run = Run(Path(scratch), feedback=VERDICT)
            try:
                run.wait(lambda run=run: (run.directory / "config.toml").exists())
                _kill_until_finished(run, chance, killed, moments)
                check_accounting(run.directory)
            except AssertionError as violation:
                print(f"violated with seed {seed}, in run {runs}, after {dict(killed)}:\n{violation}")
                run.kill("all")
                return 1
            recoveries += list(recovery(run.directory))
            runs += 1
        print(f"    run {runs}: {killed.total()} of {moments} kills", flush=True)
    print(f"{'processes killed at random moments':60} {killed.total():10d}  {dict(killed)}")
    print(f"{'runs that trained every prompt once an epoch or recorded it':60} {runs:10d}  of {runs}")
    if recoveries:
        show("recovery (group latencies), median", median(recoveries), 1.5)
        show("recovery (group latencies), worst", max(recoveries), 1.5)
    return 0


def _kill_until_finished(run: Run, chance: random.Random, killed: Counter[str], moments: int) -> None:
    while True:
        if killed.total() < moments:
            end = time.monotonic() + chance.uniform(0, LONGEST)
            while run.running and time.monotonic() < end:
                time.sleep(0.005)
        if not run.running or killed.total() >= moments:
            said = run.end(120)
            assert run.finished, said
            return
        who = chance.choice(TARGETS)
        who = who if who == "all" or who in run.processes() else "main"
        before = run.steps
        pids = run.kill(who)
        killed[who] += 1
        if who in ("engine", "environment"):
            run.wait(lambda before=before: run.steps > before or run.finished)
            continue
        run.end(10)
        if run.finished:  # it had nothing left to do but to say so
            return
        assert not left_after(pids), f"{who} was killed, and others live on"
        assert not any(path.exists() for path in run.memory)
        run.resume()


def recovery(run: Path) -> Iterator[float]:
    """Seconds that each resume took, if it came to a step."""
    dispatched: dict[int, float] = {}
    latencies: list[float] = []
    waits: list[float] = []
    resumed, first = False, None
    for event in _events(run):
        match event["event"]:
            case "RunStarted":
                resumed, first = event["resumed"], None
            case "GroupsReady":
                first = first or event["time"]
            case "Dispatched":
                first = first or event["time"]
                dispatched |= {slot["slot"]: event["time"] for slot in event["slots"]}
            case "GroupFinished" if event["slot"] in dispatched:
                latencies.append(event["time"] - dispatched[event["slot"]])
            case "StepEnded" if resumed and first:
                waits.append(event["time"] - first)
                resumed = False
    yield from (wait / median(latencies) for wait in waits)


def _events(run: Path) -> Iterator[dict[str, Any]]:
    for line in (run / "events.jsonl").read_text().splitlines():
        try:
            yield json.loads(line)
        except ValueError:  # half of a line, when the process was killed
            continue


def show(name: str, value: float, limit: float | None = None) -> None:
    feedback = "" if limit is None else f"<= {limit:g}  {'ok' if value <= limit else 'short'}"
    print(f"{name:60} {value:10.3f}  {feedback}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
