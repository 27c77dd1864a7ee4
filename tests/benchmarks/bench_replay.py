"""Steps of real runs are computed again: 100 random ones of 10 runs, and 50 flipped bits are found.

    python tests/benchmarks/bench_replay.py [SEED]

Two runs of each kind: synchronous, staleness 2, killed and resumed, LoRA with dropout, and two ranks.  The
limits are those of the issue: each step gives the recorded fingerprints, takes at most 1.2 times as long as
the step of the run (the median of the ratios), and a stored token takes at most 14 bytes.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from safetensors.numpy import load_file

from grpo_core.contracts.errors import GrpoError
from grpo_core.loop import checkpoint
from grpo_plugin_replay.history import read
from grpo_plugin_replay.replay import Replayer

GRPO = Path(sys.executable).with_name("grpo-core")
STEPS, EVERY, EACH, FLIPS = 12, 4, 10, 50
LONGEST = 1.2
BYTES = 14.0
ENVIRONMENT = """
import grpo_core as grpo

class Letters(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages=f"t{i}=") for i in range(60)]
    def evaluate(self, episodes):
        return [float(sum(map(ord, e.reply)) % 5) for e in episodes]
"""
SETTINGS = {
    "trainer.steps": STEPS, "trainer.prompts_per_step": 4, "rollout.group_size": 4, "rollout.max_tokens": 100,
    "validation.every": 0, "model.options.warm_start_steps": 0, "trainer.threads": 1, "engine.threads": 1,
    "checkpoint.every": EVERY, "checkpoint.keep_every": EVERY, "pipeline.max_staleness": 1,
}  # fmt: skip
KINDS: dict[str, dict[str, object]] = {
    "sync": {"pipeline.max_staleness": 0},
    "stale": {"pipeline.max_staleness": 2, "trainer.updates_per_step": 2},
    "killed": {},
    "lora": {"model.lora.rank": 4, "model.lora.dropout": 0.1, "loss.options.kl.coefficient": 0.01},
    "ranks": {"trainer.ranks": 2},
}


def command(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [GRPO, "train", *arguments], cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def made(cwd: Path, kind: str, seed: int) -> Path:
    """Train a run of a kind; return its directory."""
    run = cwd / f"{kind}-{seed}"
    settings: dict[str, object] = {**SETTINGS, **KINDS[kind], "seed": seed}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    process = command(cwd, "--env", "./letters.py:Letters", *sets, "--output", run.name)
    if kind == "killed":
        while not (run / "rollouts" / f"step-{EVERY + 3:06d}.jsonl.gz").exists():
            if process.poll() is not None:
                raise SystemExit(process.communicate()[0])
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        process = command(cwd, "--resume", run.name)
    said = process.communicate()[0]
    if process.returncode:
        raise SystemExit(said)
    return run


async def replayed(run: Path, chosen: set[int]) -> tuple[int, list[float], list[str]]:
    """Compute the chosen steps again; return how many were the same, the ratios of times, and differences."""
    history, same, ratios, told = read(run), 0, [], []
    while chosen:
        first = min(chosen)
        start = max(
            [0, *(step for step, _ in checkpoint.complete_names(run / "checkpoints") if step < first)]
        )
        last = max(step for step in chosen if step <= start + EVERY)
        async with Replayer(history) as replayer:
            await replayer.begin(first)
            async for each in replayer.until(last):
                took = history.step(each.step).metrics["time/train"]
                if each.step > start + 1 and took:  # a process is slow at its first step
                    ratios.append(each.seconds / took)
                if each.step in chosen:
                    same += not each.difference
                    told += [f"{run.name}, step {each.step}: {each.difference}"] if each.difference else []
        chosen = {step for step in chosen if step > last}
    return same, ratios, told


async def found(run: Path, chance: random.Random, scratch: Path) -> bool:
    """Flip a bit in a copy of a run's files; return whether a replay names the file."""
    copy = scratch / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(run, copy)
    step = chance.randrange(EVERY + 1, STEPS + 1)
    start = max(s for s, _ in checkpoint.complete_names(copy / "checkpoints") if s < step)
    path = chance.choice(
        [
            copy / "rollouts" / f"step-{step:06d}.safetensors",
            *(copy / "checkpoints" / f"step-{start:06d}").rglob("*.safetensors"),
        ]
    )
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
    try:
        async with Replayer(read(copy)) as replayer:
            await replayer.begin(step)
    except GrpoError as error:
        return path.name in str(error)
    return False


def main() -> int:
    chance = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 0)
    same, ratios, told, flips, nbytes, tokens = 0, [], [], 0, 0, 0
    with tempfile.TemporaryDirectory() as scratch:
        cwd = Path(scratch)
        (cwd / "letters.py").write_text(ENVIRONMENT)
        runs = [made(cwd, kind, seed) for kind in KINDS for seed in (1, 2)]
        for run in runs:
            mine = asyncio.run(replayed(run, set(chance.sample(range(1, STEPS + 1), EACH))))
            print(
                f"{run.name}: {mine[0]} of {EACH} steps, ratio {statistics.median(mine[1]):.2f}", flush=True
            )
            same, ratios, told = same + mine[0], ratios + mine[1], told + mine[2]
            for path in (run / "rollouts").glob("*.safetensors"):
                nbytes, tokens = nbytes + path.stat().st_size, tokens + len(load_file(path)["ids"])
        for _ in range(FLIPS):
            flips += asyncio.run(found(chance.choice(runs), chance, cwd))
    print("\n".join(told))
    ratio, size = statistics.median(ratios), nbytes / tokens
    figures = [
        ("steps with the recorded fingerprints", same, EACH * len(runs), same == EACH * len(runs)),
        ("time of a step, replayed to trained", ratio, LONGEST, ratio <= LONGEST),
        ("bytes of a stored token", size, BYTES, size <= BYTES),
        ("flipped bits that are found before a step is computed", flips, FLIPS, flips == FLIPS),
    ]
    for name, value, limit, good in figures:
        print(f"{name:60} {value:8.2f} {limit:8.2f}  {'ok' if good else 'MISSED'}")
    return int(not all(good for *_, good in figures))


if __name__ == "__main__":
    sys.exit(main())
