"""A short real run to which one thing happens at one moment, and an independent checker of what it leaves.

The checker reads the files of the run as anybody could: it uses nothing of ``grpo_core``.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import resource
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from attrs import frozen
from killing import Run, left_after
from safetensors.numpy import load_file

from grpo_core import stored_rollouts

STEPS, PER_STEP, GROUP, PROMPTS, STALENESS, VALIDATE, SAVE = 30, 3, 4, 30, 2, 5, 3
DEADLINE = 30.0
"""Seconds that the trainer and the engine may take for one call."""
LONGEST = 6 * DEADLINE
"""Seconds after which a run that has not ended hangs."""
PAUSE = 3.0
"""Seconds for which the main process is stopped."""

PROCESSES = ("main", "trainer", "engine", "environment")
FAULTS = ("SIGKILL", "SIGSTOP", "SIGSEGV", "limit")
MOMENTS = ("training", "checkpoint", "weight sync", "validation")

WORDS = f"""
import asyncio
from pathlib import Path
import grpo_core as grpo

class Words(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages=f"t{{i}}=", answer=str(i % 10), info={{"split": split}}) for i in range({PROMPTS})]
    async def evaluate(self, episodes):
        if any(e.prompt.info["split"] == "validation" for e in episodes):
            Path("validating").touch()
            await asyncio.sleep(0.3)
            Path("validating").unlink(missing_ok=True)
        await asyncio.sleep(0.03)
        return [float(e.reply == e.prompt.answer) for e in episodes]
"""  # noqa: E501
SETTINGS = {
    "trainer.steps": STEPS, "trainer.prompts_per_step": PER_STEP, "rollout.group_size": GROUP,
    "pipeline.max_staleness": STALENESS, "validation.every": VALIDATE, "checkpoint.every": SAVE,
    "trainer.deadline": DEADLINE, "engine.deadline": DEADLINE, "environment.deadline": 5,
    "rollout.max_tokens": 16,
}  # fmt: skip


@frozen(kw_only=True)
class Crash:
    """The effect of a fault on a run, and the problems that the checker found."""

    outcome: str
    seconds: float
    """From the fault to the end of the life, or of the run."""
    problems: list[str]


def make_model(cwd: Path) -> Path:
    """Make a tiny model once for many runs, as a run of one step does."""
    run = Run(cwd, environment=WORDS, settings={"trainer.steps": 1, "validation.every": 0})
    said = run.end(180)
    assert run.finished, said
    return run.directory / "model"


def crash(cwd: Path, model: Path, process: str, fault: str, moment: str) -> Crash:
    """Start a run, let a fault happen to a process at a moment, and resume the run until it finishes."""
    run = Run(cwd, environment=WORDS, settings={**SETTINGS, "model.path": model})
    try:
        run.wait(lambda: run.steps >= 4, 180)
        stopped = await_moment(run, moment)
        strike(run, process, fault)
        began = time.monotonic()
        if stopped and not (process == "engine" and fault == "SIGSTOP"):
            _signal(stopped, signal.SIGCONT)
        if (process, fault) == ("main", "SIGSTOP"):
            time.sleep(PAUSE)
            _signal(run.process.pid, signal.SIGCONT)
        said, problems = _end(run)
        seconds = time.monotonic() - began
        problems += [f"process {pid} is left" for pid in left_after(run.everything())]
        problems += checkpoint_problems(run.directory, finished=run.finished)
        outcome = "goes on" if run.finished else _outcome(run.process.returncode, said)
        lives = 1
        while not run.finished and lives < 4:
            run.resume()
            said, hangs = _end(run)
            problems += hangs
            lives += 1
        if not run.finished:
            problems.append(f"not finished after {lives} lives: {said[-500:]}")
        problems += [f"process {pid} is left at the end" for pid in left_after(run.everything())]
        return Crash(outcome=outcome, seconds=seconds, problems=problems + list(check(run.directory)))
    finally:
        for pid in run.everything():
            _signal(pid, signal.SIGKILL)


def _end(run: Run) -> tuple[str, list[str]]:
    """Return what a run says until it ends, and a problem if it does not end."""
    try:
        return run.end(LONGEST), []
    except subprocess.TimeoutExpired:
        steps = run.steps
        for pid in run.everything():
            _signal(pid, signal.SIGKILL)
        return run.end(), [f"still running after {LONGEST:g} s, at step {steps}"]


def _outcome(code: int, said: str) -> str:
    if code < 0:
        return f"dies of {signal.Signals(-code).name}, resumed"
    trace = " with a traceback" if "Traceback" in said else ""
    return f"ends with {code}{trace}, resumed"


def await_moment(run: Run, moment: str) -> int:
    """Wait for a moment in a run; return the pid of its engine if it was stopped for it, or 0."""
    if moment == "training":
        steps = run.steps
        run.wait(lambda: run.steps > steps)
    elif moment == "checkpoint":
        checkpoints = run.directory / "checkpoints"
        seen = set(os.listdir(checkpoints))
        run.wait(lambda: any(n.endswith(".partial") and n not in seen for n in os.listdir(checkpoints)))
    elif moment == "validation":
        (run.cwd / "validating").unlink(missing_ok=True)
        run.wait((run.cwd / "validating").exists)
    else:
        return _within_a_sync(run)
    return 0


def _within_a_sync(run: Run) -> int:
    """Stop the engine so that the weights of a step that has ended stay on their way; return its pid."""
    while True:
        engine = run.processes()["engine"]
        _signal(engine, signal.SIGSTOP)
        until = time.monotonic() + 1.0
        while time.monotonic() < until:
            last = {event["event"]: event["step"] for event in events(run.directory)}
            if last["StepEnded"] > last["Synced"]:
                before = (run.directory / "events.jsonl").stat().st_size
                time.sleep(0.3)
                if before == (run.directory / "events.jsonl").stat().st_size:
                    return engine
        _signal(engine, signal.SIGCONT)
        steps = run.steps
        run.wait(lambda steps=steps: run.steps > steps)


def strike(run: Run, process: str, fault: str) -> None:
    pid = run.processes()[process]
    if fault == "limit":  # from now on it gets no more than another MiB of addresses
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + 2**20
        resource.prlimit(pid, resource.RLIMIT_AS, (most, most))
    else:
        _signal(pid, getattr(signal, fault))


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


# ---------------------------------------------------------------------------------- the checker


def events(run: Path) -> list[dict[str, Any]]:
    """The events of a run; a line that a death cut off is left out."""
    found = []
    for line in (run / "events.jsonl").read_text().splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def check(run: Path) -> Iterator[str]:
    """Yield everything that is wrong with the files of a run that has finished."""
    seen = events(run)
    ready = {event["step"]: event["groups"] for event in seen if event["event"] == "GroupsReady"}
    yield from _group_problems(ready)
    yield from _stream_problems(ready, seen)
    yield from _life_problems(seen)
    yield from _metric_problems(run)
    yield from _rollout_problems(run, ready)
    yield from checkpoint_problems(run, finished=True)


def _group_problems(ready: dict[int, list[dict[str, Any]]]) -> Iterator[str]:
    """A step that was trained again after a resume counts as it was trained last; other weights are lost."""
    if sorted(ready) != list(range(STEPS)):
        yield f"steps {sorted(ready)}"
    for step, groups in ready.items():
        if len(groups) != PER_STEP:
            yield f"step {step} has {len(groups)} groups"
        for group in groups:
            generated, (oldest, newest) = group["generation_version"], group["token_versions"]
            if not step - STALENESS <= generated <= oldest <= newest <= step <= group["target_version"]:
                yield f"step {step} trains {group}"
            if len(group["rewards"]) != GROUP or not set(group["rewards"]) <= {0.0, 1.0}:
                yield f"step {step} has the rewards {group['rewards']}"


def _stream_problems(ready: dict[int, list[dict[str, Any]]], seen: list[dict[str, Any]]) -> Iterator[str]:
    """Each slot has one prompt and is trained once or skipped; each epoch has each prompt once."""
    slots: dict[int, set[str]] = {}
    for slot in (slot for event in seen if event["event"] == "Dispatched" for slot in event["slots"]):
        slots.setdefault(slot["slot"], set()).add(slot["prompt"])
    trained = Counter(group["slot"] for groups in ready.values() for group in groups)
    skipped = {event["slot"] for event in seen if event["event"] == "PromptSkipped"}
    yield from (f"slot {slot} has the prompts {names}" for slot, names in slots.items() if len(names) > 1)
    yield from (f"slot {slot} is trained {n} times" for slot, n in trained.items() if n > 1)
    yield from (f"slot {slot} is lost" for slot in slots if slot not in trained and slot not in skipped)
    if sorted(slots) != list(range(len(slots))):
        yield f"slots {sorted(slots)}"
    for groups in ready.values():
        yield from (f"trained is {g}" for g in groups if slots.get(g["slot"]) != {g["prompt"]})
    for first in range(0, len(slots) - PROMPTS + 1, PROMPTS):
        names = [name for slot in range(first, first + PROMPTS) for name in slots.get(slot, ())]
        if len(set(names)) != PROMPTS:
            yield f"slots {first} to {first + PROMPTS - 1} have {len(set(names))} different prompts"


def _life_problems(seen: list[dict[str, Any]]) -> Iterator[str]:
    """In each life steps end and versions are synced one after the other, from the step that it began at."""
    ended = synced = None
    for event in seen:
        match event["event"]:
            case "RunStarted":
                ended = synced = event["step"]
            case "StepEnded" | "Synced" if ended is None or synced is None:
                yield f"{event['event']} before the run has started"
            case "StepEnded":
                ended += 1
                if event["step"] != ended:
                    yield f"step {event['step']} ended, expected {ended}"
            case "Synced":
                synced += 1
                if not event["step"] == synced <= ended:
                    yield f"version {event['step']} is synced, expected {synced} of {ended}"


def _metric_problems(run: Path) -> Iterator[str]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [line["step"] for line in lines if "time/step" in line]
    if steps != list(range(1, STEPS + 1)):
        yield f"metrics of the steps {steps}"
    validated = [line["step"] for line in lines if "time/step" not in line]
    if sorted(validated) != list(range(0, STEPS + 1, VALIDATE)):
        yield f"metrics of the validations {validated}"


def _rollout_problems(run: Path, ready: dict[int, list[dict[str, Any]]]) -> Iterator[str]:
    files = sorted(path.name for path in (run / "rollouts").glob("step-*"))
    ends = ("jsonl.gz", "safetensors")
    if files != [f"step-{step:06}.{end}" for step in range(1, STEPS + 1) for end in ends]:
        yield f"rollouts {files}"
        return
    for step, groups in ready.items():
        with gzip.open(run / "rollouts" / f"step-{step + 1:06}.jsonl.gz", "rt", encoding="utf-8") as file:
            lines = file.read().splitlines()
        read = [rollout for group in stored_rollouts(run, step + 1) for rollout in group.rollouts]
        if [each.n_sampled for each in read] != [json.loads(line)["tokens"] for line in lines]:
            yield f"the tokens of step {step} do not belong to its texts"
        logged = [(line["prompt"], line["reward"]) for line in map(json.loads, lines)]
        if logged != [(group["prompt"], reward) for group in groups for reward in group["rewards"]]:
            yield f"the rollouts of step {step} are not those that it trained"


def checkpoint_problems(run: Path, *, finished: bool) -> Iterator[str]:
    """Every directory with the name of a checkpoint is whole: what its manifest lists, byte for byte."""
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    whole = [name for name in names if not name.endswith(".partial")]
    if finished and (whole[-1] != f"step-{STEPS:06}" or whole != names):
        yield f"checkpoints at the end: {names}"
    for name in whole:
        directory = run / "checkpoints" / name
        manifest = json.loads((directory / "manifest.json").read_text())["files"]
        files = {str(path.relative_to(directory)): path for path in directory.rglob("*") if path.is_file()}
        files.pop("manifest.json")
        if set(files) != set(manifest):
            yield f"{name} has {sorted(files)}, its manifest {sorted(manifest)}"
        for file, path in files.items():
            if hashlib.sha256(path.read_bytes()).hexdigest() != manifest[file]["sha256"]:
                yield f"{name}/{file} is altered"
        step = int(name.removeprefix("step-"))
        if json.loads((directory / "pipeline.json").read_text())["step"] != step:
            yield f"{name} holds another step"
        kept = directory / "pipeline.safetensors"
        if kept.exists() and load_file(kept)["versions"].max() > step:
            yield f"{name} holds tokens of later weights"
        for tensor, values in load_file(directory / "trainer" / "model.safetensors").items():
            if not abs(values).max() < float("inf"):
                yield f"{name} has numbers that are not finite in {tensor}"
