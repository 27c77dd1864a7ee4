"""Measures how the files of a run grow, and what it costs to read them: disk, seconds and peak memory.

A run is made of records: 64 groups of 8 rollouts in each step, with a checkpoint of a few kilobytes every 20
steps, written by the tracker that writes a real run.  Completions have TOKENS tokens; their text is made of
words, so that it compresses as text does.  Everything is measured at two lengths: twice the steps may cost
twice as much, and no more than twice the memory.

    python tests/benchmarks/bench_growth.py [STEPS [TOKENS]]
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attrs import evolve

from grpo_core.config import Config, TaskConfig, TrackingConfig, TrainerConfig, as_table
from grpo_core.contracts.events import (
    Dispatched,
    Event,
    GroupFinished,
    GroupsReady,
    RunEnded,
    RunStarted,
    Saved,
    Saving,
    StepEnded,
    Synced,
    Validated,
)
from grpo_core.contracts.records import Group, Prompt, Rollout, Segment, Slot
from grpo_core.contracts.tokens import Tokens
from grpo_core.loop import checkpoint
from grpo_core.loop.metrics import task_metrics
from grpo_core.reporting.files import FilesTracker
from grpo_core.reporting.trackers import call
from grpo_core.storage.run_directory import RunDirectory

STEPS, TOKENS = 2000, 200
PROMPTS, GROUP, EVERY = 64, 8, 20
PROCESSES = 5
LIMIT, LIMIT_OF_VERIFY = 1.15, 1.05
"""Largest cost of a step of the longer run, over that of a step of the shorter one."""
WORDS = "the sum of both sides is therefore at most n so we may assume that it holds for all values"


def main() -> int:
    given = [int(word) for word in sys.argv[1:] if word.isdigit()]
    steps, tokens = (*given, *(STEPS, TOKENS)[len(given) :])
    costs = [measure(length, tokens) for length in (steps // 2 // EVERY * EVERY, steps // EVERY * EVERY)]
    failed = 0
    for name in costs[0]:
        ratio = costs[1][name] / costs[0][name]
        limit = 2 * (LIMIT_OF_VERIFY if name == "verify (s)" else LIMIT)
        print(
            f"{name + f', {steps} steps':60} {costs[1][name]:10.2f}   x{ratio:.2f}, limit {limit:.2f}",
            flush=True,
        )
        failed += ratio > limit
    return failed


def measure(steps: int, tokens: int) -> dict[str, float]:
    """Return the costs of a run of so many steps, by name."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        began = time.perf_counter()
        make(run, steps, tokens)
        written = time.perf_counter() - began
        costs = {"written in (s)": written}
        for part in ("events.jsonl", "metrics.jsonl", "rollouts"):
            found = [run / part] if (run / part).is_file() else (run / part).iterdir()
            costs[f"{part} (MB)"] = sum(path.stat().st_size for path in found) / 1e6
        for command in ("verify", "report", "resume"):
            seconds, peak = cost(command, run, steps)
            costs |= {f"{command} (s)": seconds, f"{command}, peak memory (MB)": peak}
        return costs


PROGRAM = """
import resource, sys, time
from pathlib import Path
from grpo_core.reporting.verification import verified
from grpo_plugin_report.report import write
from grpo_core.reporting.files import FilesTracker
from grpo_core.contracts.records import RunInfo
command, run, cut = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
began = time.process_time()
if command == "verify":
    found = verified(run)
    assert not found.findings, found
elif command == "report":
    write(run)
else:  # as a resumed run opens its files; half of the newest interval between checkpoints is forgotten
    FilesTracker(RunInfo(name="run", directory=run, config={}, resumed_from=cut)).close()
seconds = time.process_time() - began
print(seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
"""


def cost(command: str, run: Path, steps: int) -> tuple[float, float]:
    """Return the CPU seconds and the peak memory, in MB, of one command in a separate process.

    Of several processes, since caches and clocks change, the fewest count; only the first resumes.
    """
    number = 1 if command == "resume" else PROCESSES
    arguments = [sys.executable, "-c", PROGRAM, command, str(run), str(steps - EVERY)]
    found = [subprocess.run(arguments, check=True, capture_output=True, text=True) for _ in range(number)]
    seconds, peak = zip(*(map(float, each.stdout.split()) for each in found), strict=True)
    return min(seconds), min(peak)


# ---------------------------------------------------------------------------------- the run


def make(directory: Path, steps: int, tokens: int) -> None:
    """Write the files of a run."""
    config = Config(
        tasks={"task": TaskConfig(env="x")},
        trainer=TrainerConfig(steps=steps, prompts_per_step=PROMPTS),
        tracking=TrackingConfig(trackers=["files"]),
    )
    config = evolve(
        config,
        rollout=evolve(config.rollout, group_size=GROUP),
        checkpoint=evolve(config.checkpoint, every=EVERY),
        validation=evolve(config.validation, every=EVERY),
        pipeline=evolve(config.pipeline, max_staleness=0),
    )
    run = RunDirectory.create(directory, config)
    tracker = FilesTracker(run.info(config, None), tokens=False)  # bench_tokens.py has their size
    for event in story(run, config, steps, tokens):
        call(tracker, evolve(event, time=time.time()))
    tracker.close()


def story(run: RunDirectory, config: Config, steps: int, tokens: int) -> Iterator[Event]:
    """Yield the events of a synchronous run in which nothing goes wrong."""
    chance = random.Random(0)
    texts = [" ".join(chance.choices(WORDS.split(), k=tokens)) for _ in range(50)]
    yield RunStarted(directory=str(run.path), config=as_table(config))
    for step in range(steps):
        slots = tuple(_slot(step, place) for place in range(PROMPTS))
        if step % EVERY == 0:
            yield Validated(step=step, version=step, results={"task": {"accuracy": 0.5}})
        yield Dispatched(step=step, slots=slots)
        for slot in slots:
            yield GroupFinished(step=step, slot=slot.id, task="task", prompt=str(slot.id))
        groups = tuple(_group(slot, tokens, texts, chance) for slot in slots)
        yield GroupsReady(step=step, groups=groups)
        yield StepEnded(step=step + 1, metrics=_metrics(groups, step))
        yield Synced(step=step + 1)
        if (step + 1) % EVERY == 0:
            if step + 1 == steps:
                yield Validated(step=steps, version=steps, results={"task": {"accuracy": 0.5}})
            yield from _checkpoint(run, step + 1)
    yield RunEnded(step=steps, reason="finished")


def _slot(step: int, place: int) -> Slot[Prompt]:
    number = step * PROMPTS + place
    prompt = Prompt(messages=f"What is {number} + {number}?", id=str(number), environment="task")
    return Slot(id=number, generation_version=step, target_version=step, prompt=prompt)


def _group(slot: Slot[Prompt], tokens: int, texts: list[str], chance: random.Random) -> Group:
    assert slot.prompt is not None
    ids = Tokens.generated([1] * tokens, [-1.0] * tokens, [slot.generation_version] * tokens)
    rollouts = tuple(
        Rollout(
            segments=[Segment(prompt_ids=(1, 2, 3), tokens=ids)],
            messages=(*slot.prompt.messages, {"role": "assistant", "content": _said(texts, chance)}),
            reward=float(chance.random() < 0.5),
            metrics={"exact": 0.5},
            turns=1,
            finish_reason="stop",
        )
        for _ in range(GROUP)
    )
    return Group(
        prompt=slot.prompt,
        rollouts=rollouts,
        generation_version=slot.generation_version,
        target_version=slot.target_version,
        slot=slot.id,
    )


def _said(texts: list[str], chance: random.Random) -> str:
    """Return a text that differs from all others in many places."""
    words = chance.choice(texts).split()
    return " ".join(word if chance.random() < 0.8 else str(chance.randrange(1000)) for word in words)


def _metrics(groups: tuple[Group, ...], step: int) -> dict[str, float]:
    counted = dict.fromkeys(("in_flight", "retrying", "ready", "skipped", "filtered"), 0.0)
    counted |= {"dispatched": PROMPTS * (step + 1.0), "attempts": PROMPTS * (step + 1.0)}
    metrics = {f"buffer/{name}": value for name, value in counted.items()}
    metrics |= {f"time/part_{place}": step / 7 for place in range(25)}
    return task_metrics(groups, step=step) | metrics | {"time/step": 1.0, "overlap": 0.9}


def _checkpoint(run: RunDirectory, step: int) -> Iterator[Event]:
    from grpo_core.storage.disk import Disk, seal

    directory = run.checkpoints / f"step-{step:06d}"
    directory.mkdir(parents=True)
    (directory / "pipeline.json").write_text("{}")
    manifest = {"format": checkpoint.FORMAT, "step": step, "files": seal(Disk(), directory)}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    Disk().remove(run.checkpoints / f"step-{step - 2 * EVERY:06d}")
    yield Saving(step=step)
    yield Saved(step=step, directory=str(directory))


if __name__ == "__main__":
    sys.exit(main())
