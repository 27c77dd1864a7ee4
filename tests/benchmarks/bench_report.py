"""Measures the report of a large run: its making, its size, and the time in which a real browser opens it.

The run has 1,000 steps with 100 rollouts each, a validation every 50 steps, tokens, and a timeline.  The
tracker of a real run makes it from records.  Opening is the time from the address to the end of the page's
script in headless Chromium, the best of three; it is left out where there is no chromedriver.  The same is
measured of one page that compares several such runs, by default three.

    python tests/benchmarks/bench_report.py [STEPS [RUNS]]
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from attrs import evolve

sys.path.insert(0, str(Path(__file__).parents[1]))  # the browser of the tests
import webdriver

from grpo_core.config import Config, TaskConfig, TrackingConfig, TrainerConfig
from grpo_core.contracts.events import (
    Event,
    GroupsReady,
    RunEnded,
    Span,
    StepEnded,
    TimelineExtended,
    ValidationPlayed,
)
from grpo_core.contracts.records import Group, Prompt, Rollout, Segment
from grpo_core.contracts.tokens import Tokens
from grpo_core.reporting.files import FilesTracker
from grpo_core.reporting.trackers import call
from grpo_core.storage.run_directory import RunDirectory

STEPS, GROUPS, GROUP, TOKENS, PROMPTS = 1000, 10, 10, 200, 2000
SECONDS, MEGABYTES, OPENED = 10.0, 3.0, 2.0
"""The limits: seconds to make the page, its size, and seconds to open it."""
PATIENCE = 30.0
"""Seconds after which a page that shows no rollouts is broken."""
WORDS = "the sum of both sides is therefore at most n so we may assume that it holds for all values"
PROGRAM = """
import resource, sys, time
from pathlib import Path
from grpo_plugin_report import comparison, report
output, *runs = map(Path, sys.argv[1:])
began = time.perf_counter()
comparison.write(runs, output) if len(runs) > 1 else report.write(*runs, output)
print(time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
"""


def main() -> int:
    steps, several = map(int, [*sys.argv[1:], *[STEPS, 3][len(sys.argv) - 1 :]])
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        runs = [Path(scratch) / f"run-{number}" for number in range(several)]
        make(runs[0], steps)
        for seed, path in enumerate(runs[1:], 1):
            shutil.copytree(runs[0], path)
            config = path / "config.toml"
            config.write_text(config.read_text().replace("seed = 0\n", f"seed = {seed}\n", 1))
        for its in (runs[:1], runs):
            failed += measured(
                its, Path(scratch) / "page.html", f"{steps * GROUPS * GROUP} rollouts in {steps} steps"
            )
    return failed


def measured(runs: list[Path], page: Path, told: str) -> int:
    """Print the figures of a page; return the number of those that are above their limits."""
    arguments = [sys.executable, "-c", PROGRAM, str(page), *map(str, runs)]
    said = subprocess.run(arguments, check=True, capture_output=True, text=True).stdout
    seconds, peak = map(float, said.split())
    rows = [
        ("made in (s)", seconds, SECONDS),
        ("size (MB)", page.stat().st_size / 1e6, MEGABYTES),
    ]
    if not webdriver.absent():
        rows.append(("opened in Chromium (s)", opened(page), OPENED))
    what = f"{len(runs)} x {told}" if len(runs) > 1 else told
    for name, value, limit in rows:
        print(f"{f'{name}, {what}':60} {value:8.2f}   limit {limit:g}")
    print(f"{'peak memory (MB)':60} {peak:8.0f}")
    return sum(value > limit for _, value, limit in rows)


def opened(page: Path) -> float:
    """Return the seconds until the browser shows the page and its list of rollouts."""
    found = []
    with webdriver.browser() as browser:
        for _ in range(3):
            browser.open("about:blank")
            began = time.perf_counter()
            browser.open(f"file://{page}")
            # the page unpacks its rollouts after the browser calls it loaded
            while not browser.run("return document.querySelectorAll('.list button').length"):
                assert time.perf_counter() - began < PATIENCE, "the page shows no rollouts"
            found.append(time.perf_counter() - began)
    return min(found)


def make(directory: Path, steps: int) -> None:
    """Write the files of a run."""
    config = Config(
        tasks={"task": TaskConfig(env="x")},
        trainer=TrainerConfig(steps=steps, prompts_per_step=GROUPS),
        tracking=TrackingConfig(trackers=["files"]),
    )
    run = RunDirectory.create(directory, config)
    tracker = FilesTracker(run.info(config, None))
    for number, event in enumerate(story(steps)):
        call(tracker, evolve(event, time=float(number)))
    tracker.close()


def story(steps: int) -> Iterator[Event]:
    """Yield what the report reads of a run."""
    chance = random.Random(0)
    for step in range(steps):
        if step % 50 == 0:
            yield ValidationPlayed(
                step=step, version=step, groups=tuple(_group(i, step, 1, chance) for i in range(50))
            )
        prompts = chance.sample(range(PROMPTS), GROUPS)
        yield GroupsReady(step=step, groups=tuple(_group(i, step, GROUP, chance) for i in prompts))
        yield StepEnded(step=step + 1, metrics={"time/step": 2.0, "reward/task": 0.5, "groups/task": 10.0})
        yield TimelineExtended(step=step + 1, spans=_spans(2.0 * step), now=2.0 * step + 2)
    yield RunEnded(step=steps, reason="finished")


def _group(number: int, step: int, size: int, chance: random.Random) -> Group:
    prompt = Prompt(messages=f"What is {number} + {number}?", id=str(number), environment="task", answer="1")
    ids = Tokens.generated(
        [chance.randrange(30_000) for _ in range(TOKENS)], [-chance.random()] * TOKENS, [step] * TOKENS
    )
    rollouts = tuple(
        Rollout(
            segments=[Segment(prompt_ids=(1, 2, 3), tokens=ids)],
            messages=(
                *prompt.messages,
                {"role": "assistant", "content": " ".join(chance.choices(WORDS.split(), k=TOKENS))},
            ),
            reward=chance.random(),
            metrics={"exact": 0.5},
            turns=1,
            finish_reason=chance.choice(["stop", "length"]),
            advantage=chance.gauss(0, 1),
            trained=True,
        )
        for _ in range(size)
    )
    return Group(prompt=prompt, rollouts=rollouts, generation_version=step, target_version=step)


def _spans(begin: float) -> tuple[Span, ...]:
    stages = [("loop", "wait for groups", 0.0, 1.0), ("loop", "step", 1.0, 2.0)]
    others = [
        (lane, what, 2 * i / 10, 2 * i / 10 + 0.15)
        for i in range(10)
        for lane, what in (
            ("engine", "generate"),
            ("environment task", "evaluate"),
            ("trainer", "step: forward"),
        )
    ]
    return tuple(
        Span(lane=lane, what=what, begin=begin + first, end=begin + last, busy=last - first, calls=1)
        for lane, what, first, last in (*stages, *others)
    )


if __name__ == "__main__":
    sys.exit(main())
