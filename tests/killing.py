"""Whole runs of real processes that are killed at some moment, and what must hold afterwards."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

GRPO = Path(sys.executable).with_name("grpo-core")
PROMPTS, PER_STEP, STEPS = 40, 4, 60
EPOCHS = STEPS * PER_STEP // PROMPTS

WORDS = f"""
import asyncio
import grpo_core as grpo

class Words(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages=f"t{{{{i}}}}=", answer=str(i % 10)) for i in range({PROMPTS})]
    async def evaluate(self, episodes):
        await asyncio.sleep({{seconds}})
        return [float(e.reply == e.prompt.answer) for e in episodes]
"""
SETTINGS = {
    "trainer.steps": STEPS, "trainer.prompts_per_step": PER_STEP, "trainer.updates_per_step": 1,
    "rollout.group_size": 4, "validation.every": 0, "checkpoint.every": 1,
}  # fmt: skip

MARK = "GRPO_CORE_TEST_RUN"
"""Environment variable that all processes of a run inherit; its value is the directory of the test."""

Found = dict[str, int]
"""Pid by what it is: "main", "trainer", "engine", "environment"."""


class Run:
    """A run of sixty steps, each of forty prompts six times, with a checkpoint after each step.

    Args:
        cwd: an empty directory.
        feedback: seconds that a feedback takes.
        environment: source of another environment ``Words``.
        settings: other settings.
    """

    def __init__(
        self,
        cwd: Path,
        *,
        feedback: float = 0.0,
        environment: str | None = None,
        settings: Mapping[str, object] = SETTINGS,
    ) -> None:
        self.cwd, self.directory = cwd, cwd / "run"
        self.kills = 0
        self.memory: set[Path] = set()
        """Named shared memory that was in use at the last kill."""
        (cwd / "words.py").write_text(environment or WORDS.format(seconds=feedback))
        given = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        self._start("--env", "./words.py:Words", *given, "--output", "run")

    def _start(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [GRPO, "train", *arguments],
            cwd=self.cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env={**os.environ, MARK: str(self.cwd), **self.environ()},
        )

    def environ(self) -> dict[str, str]:
        """Return environment variables for the run."""
        return {"TMPDIR": str(self.temporary)}

    @property
    def temporary(self) -> Path:
        """The run's folder for temporary files."""
        path = self.cwd / "temporary"
        path.mkdir(exist_ok=True)
        return path

    def resume(self) -> None:
        self._start("--resume", "run")

    # ------------------------------------------------------------------------------ looking

    @property
    def steps(self) -> int:
        """Steps whose metrics are written."""
        path = self.directory / "metrics.jsonl"
        return path.read_text().count('"time/step"') if path.exists() else 0

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    @property
    def finished(self) -> bool:
        return not self.running and self.process.returncode == 0

    def wait(self, condition: Callable[[], object], seconds: float = 150.0) -> float:
        """Until it holds; returns how long that took.  AssertionError if the run ends or time is up."""
        began = time.monotonic()
        while not condition():
            assert self.running or condition(), self.process.communicate()[0]
            assert time.monotonic() < began + seconds, f"waited {seconds:g} s in vain"
            time.sleep(0.005)
        return time.monotonic() - began

    def end(self, seconds: float = 60.0) -> str:
        """Wait until the run is over; returns all that it said."""
        return self.process.communicate(timeout=seconds)[0]

    def processes(self) -> Found:
        """The processes that are alive now; children are known by where their output goes."""
        main = self.process.pid
        found = {"main": main} if self.running else {}
        try:
            children = Path(f"/proc/{main}/task/{main}/children").read_text().split()
        except OSError:
            return found
        for child in children:
            try:
                log = Path(os.readlink(f"/proc/{child}/fd/1")).name
            except OSError:
                continue
            if log.endswith(".log"):  # not what watches over the others (grpo_core.processes.orphans)
                found[log.removesuffix(".log").split("-")[0]] = int(child)
        return found

    def everything(self) -> list[int]:
        """The pids of all processes that descend from this run, also of those that lost their parent."""
        mark = f"{MARK}={self.cwd}".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    # ------------------------------------------------------------------------------ killing

    def kill(self, who: str) -> list[int]:
        """SIGKILL to one process, or to "all" at once; returns the pids of all that were alive before."""
        found = self.processes()
        self.memory = shared_memory(found.values())
        for pid in list(found.values()) if who == "all" else [found[who]] if who in found else []:
            os.kill(pid, signal.SIGKILL)
            self.kills += 1
        return list(found.values())


def killed(pid: int) -> None:
    """End a process, which another one may have started, and return when it has ended; nobody reaps it."""
    ends = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([ends], [], [])
    os.close(ends)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def left_after(pids: list[int], seconds: float = 5.0) -> list[int]:
    """Return the processes that are still alive after ``seconds``."""
    end = time.monotonic() + seconds
    while (left := [pid for pid in pids if alive(pid)]) and time.monotonic() < end:
        time.sleep(0.01)
    return left


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """Named shared memory that these processes use: what could outlive them."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            found |= {Path(line.split(maxsplit=5)[5]) for line in lines if "/dev/shm/" in line}
    return found


def check_accounting(run: Path) -> Counter[str]:
    """Every prompt of the stream was trained once or recorded as skipped; returns how often each was trained.

    Of a step that was trained again after a resume, the last time counts: the others' weights are lost.
    """
    last: dict[int, list[str]] = {}
    skipped: Counter[str] = Counter()
    for line in (run / "events.jsonl").read_text().splitlines():
        try:
            event = json.loads(line)
        except ValueError:  # the line that was being written when the process was killed
            continue
        if event["event"] == "GroupsReady":
            last[event["step"]] = [group["prompt"] for group in event["groups"]]
        elif event["event"] == "PromptSkipped":
            skipped[event["prompt"]] += 1
    assert sorted(last) == list(range(STEPS)), "every step was trained"
    assert all(len(set(prompts)) == PER_STEP for prompts in last.values())
    trained = Counter(prompt for step in last.values() for prompt in step)
    if not skipped:
        assert set(trained.values()) == {EPOCHS}, trained
    missing = {prompt: EPOCHS - trained[prompt] for prompt in trained if trained[prompt] < EPOCHS}
    assert all(n <= skipped[prompt] for prompt, n in missing.items()), (missing, skipped)
    assert sum(trained.values()) == STEPS * PER_STEP
    return trained
