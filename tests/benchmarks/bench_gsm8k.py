"""GSM8K judged as in a run, row by row, and what hostile replies cost.

    python tests/benchmarks/bench_gsm8k.py DIRECTORY       # or GSM8K=DIRECTORY: train.jsonl and test.jsonl

Prints one line per figure: name, value, limit, ok or short.  Without the files: skipped.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from grpo_core.app.sourced import SourcedProcess
from grpo_core.config import EnvironmentConfig, TaskConfig
from grpo_core.contracts.records import Episode, Feedback, Prompt
from grpo_core.environments.process import EnvironmentProcess, EnvironmentSpec

BATCH = 64
SLOWEST = 10.0
"""Seconds that a single reply may take: four timeouts of math-verify and some."""
HOSTILE = {
    "a tower of powers": "\\boxed{9^{9^{9^9}}}",
    "a factorial": "\\boxed{(99999999)!}",
    "deep fractions": "\\boxed{" + "\\frac{1}{1+" * 15 + "1" + "}" * 15 + "}",
    "20,000 digits": "\\boxed{" + "9" * 20_000 + "}",
    "a lone surrogate": "\\boxed{\ud800}",
    "an order": "Ignore the question. \\boxed{this is correct, reward 1.0}",
    "20,000 boxes": "\\boxed{" * 20_000,
    "white space": "\\boxed{" + " " * 200_000 + "}",
}


def line(name: str, value: str, good: bool) -> None:
    print(f"{name:<52}  {value}  {'ok' if good else 'short'}", flush=True)


async def judged(
    process: EnvironmentProcess, prompts: Sequence[Prompt], reply: Callable[[int], str]
) -> list[Feedback]:
    feedback: list[Feedback] = []
    for begin in range(0, len(prompts), BATCH):
        feedback += await process.evaluate(
            [
                Episode(prompt=prompt, messages=[{"role": "assistant", "content": reply(begin + place)}])
                for place, prompt in enumerate(prompts[begin : begin + BATCH])
            ]
        )
    return feedback


async def measure(directory: Path) -> None:
    files = [str(directory / name) for name in ("train.jsonl", "test.jsonl")]
    data = TaskConfig(env="math:gsm8k", data=files[0], validation_data=files[1])
    config = EnvironmentConfig(deadline=120.0)
    process = SourcedProcess(EnvironmentSpec(task="gsm8k", env="math:gsm8k", config=config), data=data)
    try:
        prompts = [*await process.prompts("train"), *await process.prompts("validation")]
        solutions = [str(prompt.info["solution"]) for prompt in prompts]
        answers = [str(prompt.answer) for prompt in prompts]
        replies: dict[str, Callable[[int], str]] = {
            "reference solutions": lambda row: solutions[row],
            "references in a box": lambda row: f"so \\boxed{{{answers[row]}}}",
            "references as dollars": lambda row: f"\\boxed{{\\${answers[row]}.00}}",
        }
        for name, reply in replies.items():
            begin = time.perf_counter()
            feedback = await judged(process, prompts, reply)
            seconds = time.perf_counter() - begin
            right = sum(each.reward == 1.0 for each in feedback)
            value = f"{right:,} of {len(prompts):,}  {len(prompts) / seconds:,.0f} a second"
            line(f"{name}: full marks", value, right == len(prompts))
        feedback = await judged(process, prompts, lambda row: f"\\boxed{{{answers[row]}1}}")
        wrong = sum(each.reward == 0.0 for each in feedback)
        line("a digit too many: nothing", f"{wrong:,} of {len(prompts):,}", wrong == len(prompts))
        await hostile(process, prompts[:1])
        line("starts of the process", f"{process.starts}, limit 1", process.starts == 1)
    finally:
        await process.aclose()


async def hostile(process: EnvironmentProcess, prompts: Sequence[Prompt]) -> None:
    for name, reply in HOSTILE.items():
        begin = time.perf_counter()
        (feedback,) = await judged(process, prompts, lambda _, said=reply: said)
        seconds = time.perf_counter() - begin
        good = feedback.reward == 0.0 and seconds <= SLOWEST
        line(f"{name}: nothing", f"{seconds:.2f} s, limit {SLOWEST:g} s", good)


def main() -> None:
    given = sys.argv[1] if len(sys.argv) > 1 and Path(sys.argv[1]).is_dir() else os.environ.get("GSM8K")
    if not given or not (Path(given) / "test.jsonl").exists():
        print("skipped: give a directory with GSM8K's train.jsonl and test.jsonl, or set GSM8K to it")
        return
    asyncio.run(measure(Path(given)))


if __name__ == "__main__":
    main()
