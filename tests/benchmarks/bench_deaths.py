"""Seconds from the SIGKILL of a process of a run until the run has noticed.

    python tests/benchmarks/bench_deaths.py [kills of each] [name of a case, or several]

A real run trains while one of its processes is killed again and again.  The run has noticed when it records
the incident that it survives, or the error that ends it, in events.jsonl; what follows (another process, a
resumed run) takes longer and is measured by bench_kill.py.  Cases whose packages are not installed are left
out.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from attrs import field, frozen

sys.path.insert(0, str(Path(__file__).parent.parent))
from killing import SETTINGS, Run

SERVES = 4.0
"""Seconds for a new process to start and to finish something: after three deaths in a row it is given up."""
PATIENCE = 120.0
"""Seconds for a run to start, to notice, and to make a step afterwards."""


@frozen
class Case:
    """A process that is killed."""

    victim: Callable[[Run], int | None]
    """Finds its pid, or None while there is none."""
    arguments: tuple[str, ...] = ()
    """Arguments of the run."""
    environ: Mapping[str, str] = field(factory=dict)
    needs: str = ""
    """A package."""
    fatal: bool = False
    """Whether the death ends the run."""


def child(who: str) -> Callable[[Run], int | None]:
    return lambda run: run.processes().get(who)


def core_of_vllm(run: Run) -> int | None:
    """Return the process in which vLLM decodes, a child of the engine's."""
    engine = run.processes().get("engine")
    for pid in below(engine) if engine else []:
        if b"resource_tracker" not in command(pid):
            return pid
    return None


def ray_worker(run: Run) -> int | None:
    return next((pid for pid in below(run.process.pid) if b"EngineWorker" in command(pid)), None)


def below(pid: int) -> Iterator[int]:
    listed = subprocess.run(["pgrep", "-P", str(pid)], capture_output=True, text=True, check=False)
    for each in map(int, listed.stdout.split()):
        yield each
        yield from below(each)


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def settings(**chosen: Any) -> tuple[str, ...]:
    return tuple(part for key, value in chosen.items() for part in ("--set", f"{key}={value}"))


POOL = ("--set", "engine.workers=2")
VLLM = settings(**{"model.options.width": 128, "engine.options.cache_mib": 64, "engine.options.max_rows": 16})
CASES = {
    "engine": Case(child("engine")),
    "an engine of a pool": Case(child("engine"), POOL),
    "environment": Case(child("environment")),
    "trainer": Case(child("trainer"), fatal=True),
    "EngineCore of vLLM": Case(
        core_of_vllm,
        ("--engine", "vllm", *VLLM),
        {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        needs="vllm",
    ),
    "Ray worker": Case(ray_worker, ("--ray", *POOL), needs="ray"),
}


class Dying(Run):
    """A run that lasts long enough."""

    def __init__(self, cwd: Path, case: Case) -> None:
        self.case = case
        super().__init__(
            cwd, feedback=0.05, settings={**SETTINGS, "trainer.steps": 100_000, "checkpoint.every": 0}
        )

    def _start(self, *arguments: str) -> None:
        super()._start(*arguments, *self.case.arguments)

    def environ(self) -> dict[str, str]:
        return dict(self.case.environ)

    def noticed(self, since: float) -> float | None:
        """Return when the run recorded a death after ``since``, or None."""
        for line in (self.directory / "events.jsonl").read_text().splitlines():
            try:
                event = json.loads(line)
            except ValueError:  # half of a line
                continue
            told = event["event"] == "ErrorRaised" or (
                event["event"] == "IncidentReported"
                and (event["kind"] in ("died", "replaced") or "died" in event["message"])
            )
            if told and event["time"] > since:
                return float(event["time"])
        return None


def seconds(case: Case, kills: int) -> Iterator[float]:
    left = kills
    while left:
        with tempfile.TemporaryDirectory() as scratch:
            run = Dying(Path(scratch), case)
            try:
                run.wait(lambda run=run: run.steps >= 2, PATIENCE)
                for _ in range(1 if case.fatal else left):
                    yield _kill(run, case)
                    left -= 1
            finally:
                if run.running:
                    os.killpg(run.process.pid, signal.SIGINT)
                    os.killpg(run.process.pid, signal.SIGINT)
                run.end(PATIENCE)


def _kill(run: Dying, case: Case) -> float:
    run.wait(lambda: case.victim(run) is not None, PATIENCE)
    pid, since = case.victim(run), time.time()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + PATIENCE
    while (noticed := run.noticed(since)) is None:
        assert time.monotonic() < end, "the run has not noticed"
        time.sleep(0.01)
    if not case.fatal:
        after = run.steps
        run.wait(lambda: run.steps >= after + 2, PATIENCE)  # incidents of one step are told together
        time.sleep(SERVES)
    return noticed - since


def main() -> int:
    kills = next((int(argument) for argument in sys.argv[1:] if argument.isdigit()), 5)
    names = [argument for argument in sys.argv[1:] if not argument.isdigit()] or [*CASES]
    for name in names:
        case = CASES[name]
        if case.needs and importlib.util.find_spec(case.needs) is None:
            continue
        found = sorted(seconds(case, kills))
        what = f"until a death is noticed (s): {name}"
        print(f"{what:60} median {median(found):.3f}, worst {found[-1]:.3f} of {len(found)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
