"""All that can be said of the engine `vllm` on a GPU, in one call.

    python tests/benchmarks/gpu_vllm.py [--model DIRECTORY]

1. what every engine must compute, in float32 and bfloat16, with graphs, asleep and awake again, with weights
   by each transport, and with two GPUs;  2. the figures of ``bench_vllm``;  3. a run that learns, with its
   trainer on the same GPU.
Ends with status 1 if anything of 1 or 3 fails.  Needs vLLM for CUDA (docs/engines.md).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bench_vllm
import torch

from grpo_core.errors import EngineError
from grpo_core.testing import ENGINE_LAWS, EngineUnderTest, make_test_model, start_engine
from grpo_core.weights.collective import CollectiveWriter
from grpo_core.weights.cuda_ipc import CudaIpcWriter
from grpo_core.weights.layout import Writer
from grpo_core.weights.shm import SharedMemoryWriter

FLOAT32 = {"dtype": "float32", "memory_fraction": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "float32": FLOAT32,
    "float32, without graphs": FLOAT32 | {"vllm": {"enforce_eager": True}},
    "float32, asleep between requests": FLOAT32 | {"sleep_after": 0.001},
    "bfloat16": {"dtype": "bfloat16", "memory_fraction": 0.3},
    "float32, weights by handle": FLOAT32,
    "float32, weights by relay": FLOAT32,
    "float32, on two GPUs": FLOAT32 | {"tensor_parallel": 2},
}
WRITERS: dict[str, Callable[[], Writer]] = {
    "float32, weights by handle": lambda: CudaIpcWriter(torch.device("cuda", 0)),
    "float32, weights by relay": lambda: CollectiveWriter(torch.device("cuda", 1), "127.0.0.1"),
}
"""Others than the host's memory.  The engine is on the first GPU; NCCL sends from another one."""
NEEDED = {"float32, on two GPUs": 2, "float32, weights by relay": 2}
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
"""The tolerance of a logprob: GPUs add up in another order, and in fewer bits where TF32 is allowed."""


async def laws(options: dict[str, Any], writer: Writer, directory: Path) -> list[str]:
    """The laws that do not hold, with what was wrong."""
    from grpo_plugin_vllm.engine import VllmEngine

    model = make_test_model(directory)
    engine = await start_engine(VllmEngine, model, device="cuda", max_rows=64, **options)
    tolerance = TOLERANCE[options["dtype"]]
    tried = EngineUnderTest(engine=engine, model=model, recomputes=True, tolerance=tolerance, writer=writer)
    await engine.update_weights(tried.publish(0))
    broken = []
    for law in ENGINE_LAWS:
        try:
            await ENGINE_LAWS[law](tried)
        except (AssertionError, EngineError, TimeoutError) as error:
            broken.append(f"{law}: {error or traceback.format_exc(limit=-1)}")
    await engine.aclose()
    return broken


def train(directory: Path) -> str:
    """Say what is wrong with a run that shares its GPU; "" if it learns."""
    settings = {
        "model.options.width": 128,
        "trainer.steps": 60,
        "trainer.device": "cuda",
        "validation.every": 60,
        "engine.options.memory_fraction": 0.3,
        "engine.options.device": "cuda",
    }
    chosen = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    grpo = Path(sys.executable).with_name("grpo-core")
    command = [str(grpo), "train", "--env", "math:sort", "--engine", "vllm", *chosen, "--output", "run"]
    done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    if done.returncode:
        return done.stdout[-2000:] + done.stderr[-2000:]
    events = map(json.loads, (directory / "run/events.jsonl").read_text().splitlines())
    first, last = (e["results"]["sort"]["accuracy"] for e in events if e["event"] == "Validated")
    print(f"run: {first:.1%} -> {last:.1%}")
    return "" if last > first + 0.15 else "it does not learn"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="for the figures; default: a tiny one")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("there is no CUDA device here")
        return 1
    print(torch.cuda.get_device_name(), f"x {torch.cuda.device_count()}")
    failed = False
    for case, chosen in CASES.items():
        if NEEDED.get(case, 1) > torch.cuda.device_count():
            print(f"{case}: there are not so many")
            continue
        with tempfile.TemporaryDirectory() as directory:
            broken = asyncio.run(laws(chosen, WRITERS.get(case, SharedMemoryWriter)(), Path(directory)))
        print(f"{case}: " + ("; ".join(broken) or f"{len(ENGINE_LAWS)} laws hold"), flush=True)
        failed |= bool(broken)
    asyncio.run(bench_vllm.measure("cuda", options.model))
    with tempfile.TemporaryDirectory() as directory:
        problem = train(Path(directory))
    print(problem or "run: ok")
    return int(failed or bool(problem))


if __name__ == "__main__":
    sys.exit(main())
