"""The trainer: what padding costs, what the vocabulary head needs, how long a step takes.

    python tests/benchmarks/bench_trainer.py [--threads 1] [--only ragged packed head steps start]

Prints one line per figure: name, value, limit, ok or short.  Compared things are run in turn, in one process,
and the best run of each counts.
"""

from __future__ import annotations

import argparse
import asyncio
import concurrent.futures
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from attrs import evolve

from grpo_core.config import ModelConfig, TrainerConfig
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.records import Batch, Row, StepResult, Weights
from grpo_core.contracts.tokens import Tokens
from grpo_core.demo.tiny import make_tiny_model
from grpo_core.training.logprobs import token_logprobs
from grpo_core.training.process import ProcessTrainer
from grpo_core.training.trainer import TorchTrainer, create


def report(name: str, value: float, unit: str, limit: float | None = None, *, most: bool = True) -> None:
    feedback = ""
    if limit is not None:
        good = value <= limit if most else value >= limit
        feedback = f"{'<=' if most else '>='} {limit:g}  {'ok' if good else 'short'}"
    print(f"{name:<62} {value:>10.4g} {unit:<9} {feedback}", flush=True)


def best(
    calls: Sequence[Callable[[], object]], rounds: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of the best run of each, run in turn."""
    seconds = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            begun = clock()
            call()
            seconds[i] = min(seconds[i], clock() - begun)
    return seconds


# ---------------------------------------------------------------------------------- what is trained


def rows(lengths: Sequence[int], *, prompt: int, vocabulary: int, group_size: int = 8) -> tuple[Row, ...]:
    chance = random.Random(0)
    made = []
    for i, n in enumerate(lengths):
        made.append(
            Row(
                prompt_ids=tuple(chance.choices(range(3, vocabulary), k=prompt)),
                tokens=Tokens.generated(chance.choices(range(3, vocabulary), k=n), (-1.0,) * n, (0,) * n),
                advantage=1.0 if i % 2 else -1.0,
                group=i // group_size,
            )
        )
    return tuple(made)


def demo_setup(directory: Path, threads: int, **options: object) -> TrainerSetup:
    path = directory / "demo"
    if not path.exists():
        make_tiny_model(path, (), warm_start_steps=0)
    return setup(path, threads, updates_per_step=4, **options)


def larger(directory: Path) -> Path:
    """19 million parameters with a vocabulary of 32,000."""
    from transformers import LlamaConfig, LlamaForCausalLM

    path = directory / "larger"
    if not path.exists():
        config = LlamaConfig(
            vocab_size=32000, hidden_size=384, intermediate_size=1024, num_hidden_layers=4,
            num_attention_heads=6, num_key_value_heads=6, tie_word_embeddings=True,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(path)
    return path


def setup(path: Path, threads: int, *, dtype: str = "float32", **options: object) -> TrainerSetup:
    trainer = TrainerConfig(**{"threads": threads, "lr": 1e-6, "device": "cpu", **options})  # type: ignore[arg-type]
    return TrainerSetup(model=ModelConfig(path=str(path), dtype=dtype), trainer=trainer)  # type: ignore[arg-type]


class Stepper:
    """Trains the same rows again and again."""

    def __init__(self, setup: TrainerSetup, given: tuple[Row, ...]) -> None:
        self.trainer, self.rows = create(setup), given

    def __call__(self) -> StepResult:
        return self.trainer.step(Batch(step=self.trainer.version, rows=self.rows, temperature=1.0))


# ---------------------------------------------------------------------------------- figures


def ragged(directory: Path, threads: int) -> None:
    """M6: useful tokens per second on ragged rows, next to rows that all have their mean length."""
    chance = random.Random(0)
    long = [48 + min(496, int(chance.expovariate(1 / 80))) for _ in range(128)]
    tiny = [13 + i % 38 for i in range(128)]
    for name, lengths, width, layers in (("48 to 544", long, 256, 4), ("13 to 50", tiny, 64, 2)):
        mean = round(sum(lengths) / len(lengths))
        given = setup(model(directory, width, layers), threads)
        uneven, even = (Stepper(given, of_their_own(each)) for each in (lengths, [mean] * len(lengths)))
        padding = uneven().metrics["tokens/padding"]
        even()
        a, b = best([uneven, even], 8, steady(threads))
        speed = (sum(lengths) / a) / (mean * len(lengths) / b)
        report(f"rows of {name} / equal rows, useful tokens per second", speed, "", 0.97, most=False)
        report(f"rows of {name}, share of the input that is no padding", 1 - padding, "", 0.98, most=False)


KINDS: Mapping[str, tuple[int, int, Sequence[int], int]] = {
    "128 rows of 13 to 50 tokens": (64, 2, [13 + i % 38 for i in range(128)], 0),
    "256 rows of 11 to 13 tokens": (64, 2, [11 + i % 3 for i in range(256)], 0),
    "128 rows of 31 tokens": (64, 2, [31] * 128, 0),
    "48 rows of 48 to 283 tokens": (128, 2, [48 + 5 * i for i in range(48)], 0),
    "48 rows of 16 to 63 tokens": (128, 2, [16 + i for i in range(48)], 0),
    "48 rows of 170 tokens": (128, 2, [170] * 48, 0),
    "32 rows of 64 to 300 tokens": (256, 4, [64 + i * 236 // 31 for i in range(32)], 0),
    "P = 6, R = 6": (64, 2, [11] * 128, 6),
    "P = 32, R = 32": (128, 2, [63] * 64, 32),
    "P = 64, R = 16": (128, 2, [79] * 64, 64),
    "P = 64, R = 64": (128, 2, [127] * 64, 64),
    "P = 8, R = 16": (256, 4, [23] * 128, 8),
    "P = 16, R = 32": (256, 4, [47] * 64, 16),
    "P = 128, R = 32": (256, 4, [159] * 32, 128),
}
"""Kinds of rows: the model's width and layers, input tokens of each row, and those of the group's prompt."""


def packed(directory: Path, threads: int) -> None:
    """Compare packed rows with sorted ones."""
    for name, (width, layers, lengths, prompt) in KINDS.items():
        given = of_groups(lengths, prompt) if prompt else of_their_own(lengths)
        path = model(directory, width, layers)
        both = [Stepper(setup(path, threads, packing=chosen), given) for chosen in (False, True)]
        for each in both:
            each()
        plain, without_padding = best(both, 6, steady(threads))
        reply = lengths[0] + 1 - prompt
        possible = 8 * (prompt + reply) / (prompt + 8 * reply)
        limit = 0.7 * possible if prompt >= 4 * reply else None
        name = f"{name}, width {width}: sorted / packed"
        report(name, plain / without_padding, "", limit, most=False)


def model(directory: Path, width: int, layers: int) -> Path:
    path = directory / f"{width}-{layers}"
    if not path.exists():
        make_tiny_model(path, (), width=width, layers=layers, warm_start_steps=0)
    return path


def of_their_own(lengths: Sequence[int], prompt: int = 8) -> tuple[Row, ...]:
    return rows([n - prompt + 1 for n in lengths], prompt=prompt, vocabulary=98)


def of_groups(lengths: Sequence[int], prompt: int) -> tuple[Row, ...]:
    made = of_their_own(lengths, prompt)
    return tuple(evolve(row, prompt_ids=made[row.group * 8].prompt_ids) for row in made)


def steady(threads: int) -> Callable[[], float]:
    """A ratio near 1 needs more than a clock that other processes disturb."""
    return time.process_time if threads == 1 else time.perf_counter


def head(_: Path, threads: int) -> None:
    """M7: logprobs with the fused head, next to log_softmax of all logits."""
    torch.set_num_threads(threads)
    n, d, v = 2048, 384, 32000
    hidden, weight, targets = head_inputs(n, d, v)

    def run(fused: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
        hidden.grad = weight.grad = None
        logprobs = head_logprobs(fused, hidden, weight, targets, dtype)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        return logprobs.detach()

    with torch.no_grad():
        exact = head_logprobs(False, hidden.double(), weight.double(), targets)
    report("fused head, largest error of a float32 logprob", (run(True) - exact).abs().max().item(), "", 2e-6)
    fused, mixed, naive = best([lambda: run(True), lambda: run(True, torch.bfloat16), lambda: run(False)], 2)
    report("fused head / log_softmax with entropy, seconds", fused / naive, "", 1.2)
    report("the same with bfloat16 products in the backward pass", mixed / naive, "", 1.2)
    small, large = peak(True, 1024, d, v), peak(True, 8192, d, v)
    report("fused head, peak memory at 8k / 1k tokens (without results)", large / small, "", 1.05)
    report("fused head, peak memory at 8k tokens", large / 2**20, "MiB")
    wide = peak(True, 2048, 64, 152_000) / peak(False, 2048, 64, 152_000)
    report("fused / naive peak memory, vocabulary 152,000, 2k tokens", wide, "", 0.05)


def head_inputs(n: int, d: int, v: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    chance = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=chance, requires_grad=True)
    weight = torch.randn(v, d, generator=chance).mul_(0.05).requires_grad_()
    return hidden, weight, torch.randint(v, (n,), generator=chance)


def head_logprobs(
    fused: bool,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if fused:
        return token_logprobs(hidden, weight, targets, product_dtype=dtype)[0]
    log_p = torch.log_softmax(hidden @ weight.T, dim=-1)
    with torch.no_grad():
        _ = -torch.linalg.vecdot(log_p.exp(), log_p)
    return log_p.gather(1, targets[:, None])[:, 0]


def peak(fused: bool, n: int, d: int, v: int) -> float:
    """Bytes at the peak of forward and backward, less the two gradients; in a separate process."""
    arguments = [sys.executable, __file__, "--peak", str(int(fused)), str(n), str(d), str(v)]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed is given back at once
    output = subprocess.run(arguments, check=True, capture_output=True, text=True, env=environment).stdout
    return float(output)


def print_peak(fused: int, n: int, d: int, v: int) -> None:
    def resident(name: str) -> int:
        line = next(line for line in Path("/proc/self/status").read_text().splitlines() if name in line)
        return int(line.split()[1]) << 10

    torch.set_num_threads(1)
    head_logprobs(True, *head_inputs(4, d, 40)).sum().backward()  # type: ignore[no-untyped-call]
    hidden, weight, targets = head_inputs(n, d, v)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    before = resident("VmRSS")
    head_logprobs(bool(fused), hidden, weight, targets).sum().backward()  # type: ignore[no-untyped-call]
    print(resident("VmHWM") - before - 4 * (n * d + v * d))


def steps(directory: Path, threads: int) -> None:
    """Step times: the demo (512 rows of 12 tokens, 4 updates) and a model with a real vocabulary."""
    chance = random.Random(0)
    short = rows([chance.randint(5, 7) for _ in range(512)], prompt=6, vocabulary=99)
    for proximal in ("recompute", "generation"):
        demo = Stepper(demo_setup(directory, threads, proximal=proximal), short)
        demo()
        report(f"demo step, proximal = {proximal}", best([demo], 5)[0] * 1000, "ms")
    long = rows([64] * 64, prompt=8, vocabulary=32000)
    for dtype in ("float32", "bfloat16"):
        step = Stepper(setup(larger(directory), threads, dtype=dtype), long)
        (seconds,) = best([step], 2)
        report(f"19M parameters, 64 x 64 tokens of 32,000, {dtype}", 64 * 64 / seconds, "tokens/s")


def start(directory: Path, _: int) -> None:
    """From nothing to a trainer that answers, and what the process costs per step over a thread."""
    given = demo_setup(directory, 1)
    short = rows([6] * 64, prompt=6, vocabulary=99)

    async def story() -> tuple[float, float, float]:
        begun = time.perf_counter()
        process = ProcessTrainer(given)
        await process.started()
        started = time.perf_counter() - begun
        try:
            thread = ThreadTrainer(given)
            seconds = {}
            for name, trainer in (("process", process), ("thread", thread)):
                times = []
                for step in range(12):
                    begun = time.perf_counter()
                    await trainer.step(Batch(step=step, rows=short, temperature=1.0))
                    await trainer.publish()
                    times.append(time.perf_counter() - begun)
                seconds[name] = min(times)
        finally:
            await process.aclose()
        return started, seconds["process"], seconds["thread"]

    started, process, thread = asyncio.run(story())
    report("trainer process, start to answer", started, "s", 6.0)
    report("step and publish of 64 short rows, process - thread", (process - thread) * 1000, "ms")


class ThreadTrainer:
    """A trainer in a thread of this process: it shares the interpreter lock with the pipeline."""

    def __init__(self, setup: TrainerSetup) -> None:
        self._thread = concurrent.futures.ThreadPoolExecutor(1)
        self._trainer: TorchTrainer = self._thread.submit(create, setup).result()

    async def step(self, batch: Batch) -> StepResult:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._trainer.step, batch)

    async def publish(self, canary: Sequence[tuple[int, ...]] = ()) -> Weights:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._trainer.publish)


PARTS = {each.__name__: each for each in (ragged, packed, head, steps, start)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--peak", nargs=4, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.peak:
        print_peak(*arguments.peak)
        return
    with tempfile.TemporaryDirectory() as directory:
        for name in arguments.only:
            PARTS[name](Path(directory), arguments.threads)


if __name__ == "__main__":
    main()
