"""The engine `vllm` against vLLM itself, against copying memory, and against the trainer's own logprobs.

    python tests/benchmarks/bench_vllm.py [--device cuda] [--model DIRECTORY]

Prints one line per figure: name, value, limit, ok or short.  Ratios are of the best of some runs in turn.
Without vLLM (make install-vllm) it says so and ends.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from grpo_core.contracts.records import EngineSetup, GenerationRequest
from grpo_core.demo.tiny import make_tiny_model
from grpo_core.engines import wire
from grpo_core.weights.reading import block
from grpo_core.weights.shm import SharedMemoryWriter
from grpo_plugin_devkit.decoding import EngineUnderTest, make_test_model, mixed
from grpo_plugin_scale.weights.cuda_ipc import CudaIpcWriter

ROUNDS = 5


def requests(n: int, tokens: int) -> list[GenerationRequest]:
    """Groups of eight."""
    return [GenerationRequest(prompt_ids=(5, 6, 7 + i // 8), max_tokens=tokens, seed=i) for i in range(n)]


def line(
    name: str, value: float, limit: float | None = None, unit: str = "", *, at_most: bool = False
) -> None:
    feedback = ""
    if limit is not None:
        good = value <= limit if at_most else value >= limit
        feedback = f"  limit {limit:g}  {'ok' if good else 'short'}"
    print(f"{name:<58} {value:>12,.4g}{unit}{feedback}", flush=True)


SHARE = 0.3
"""Share of a GPU's memory for each of two engines that are there at the same time."""


def engine(model: Path, device: str, **options: object):  # type: ignore[no-untyped-def]
    from grpo_plugin_vllm.engine import VllmEngine

    setup = EngineSetup(model=str(model), log_directory=str(model.parent), deadline=300.0)
    return VllmEngine(setup, device=device, memory_fraction=SHARE, **options)  # type: ignore[arg-type]


# ---------------------------------------------------------------------------------- tokens a second


def serve_directly(model: str, device: str) -> None:
    """vLLM's offline engine in a separate process; it generates the same at each line of its input."""
    import inspect

    from attrs import evolve

    from grpo_plugin_vllm import completing
    from grpo_plugin_vllm.engine import VllmEngine
    from grpo_plugin_vllm.options import Options, arguments, prepare

    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(VllmEngine).parameters.items()
        if name not in ("setup", "vllm")
    }
    options = evolve(Options(**defaults, vllm={}), device=device, memory_fraction=SHARE)
    prepare(device)
    from vllm import LLM

    chosen = arguments(options, EngineSetup(model=model), device=device, dtype="float32")
    llm = LLM(**chosen)
    print("ready", flush=True)
    for text in sys.stdin:
        asked = wire.unpack_requests(json.loads(text))
        prompts = [{"prompt_token_ids": request.prompt_ids.tolist()} for request in asked]
        parameters = [completing.parameters(request, seeds=True) for request in asked]
        began = time.perf_counter()
        llm.generate(prompts, parameters, use_tqdm=False)
        print(f"seconds {time.perf_counter() - began}", flush=True)


class Direct:
    def __init__(self, model: Path, device: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--direct", "--model", str(model), "--device", device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=os.environ
            | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "VLLM_NO_USAGE_STATS": "1"},
        )
        self._read("ready")

    def generate(self, asked: Sequence[GenerationRequest]) -> float:
        """Seconds."""
        assert self.process.stdin is not None
        print(json.dumps(wire.pack_requests(asked)), file=self.process.stdin, flush=True)
        return float(self._read("seconds").split()[1])

    def _read(self, word: str) -> str:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            if text.startswith(word):
                return text
        raise RuntimeError("vLLM does not start; run this script with --direct to see why")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


async def throughput(tried: EngineUnderTest, model: Path, device: str) -> None:
    direct = Direct(model, device)
    try:
        for n, tokens in ((512, 32), (64, 128)):
            asked = requests(n, tokens)
            ours, theirs = [], []
            for _ in range(ROUNDS):
                theirs.append(direct.generate(asked))
                began = time.perf_counter()
                await tried.engine.generate(asked)
                ours.append(time.perf_counter() - began)
            line(f"{n} requests of {tokens} tokens: tokens/s", n * tokens / min(ours))
            line(f"{n} requests of {tokens} tokens: share of vLLM alone", min(theirs) / min(ours), 0.98)
    finally:
        direct.close()


# ---------------------------------------------------------------------------------- logprobs, weights


async def logprobs(tried: EngineUnderTest, dtype: str, limit: float | None) -> None:
    asked = mixed(128)
    completions = await tried.engine.generate(asked)
    differences = torch.cat(
        [tried.difference(*pair, tried.version) for pair in zip(asked, completions, strict=True)]
    )
    line(f"{dtype}: largest difference of a logprob", float(differences.max()), limit, at_most=True)
    for share in (0.5, 0.99):
        line(
            f"{dtype}: {share:.0%} of {len(differences)} differ by less than",
            float(differences.quantile(share)),
        )


async def restart(tried: EngineUnderTest) -> None:
    os.kill(tried.engine.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    began = time.perf_counter()
    while True:
        try:
            await tried.engine.generate(requests(1, 1))
            break
        except Exception:  # it notices now that its child is gone
            continue
    line("killed: seconds to the first token", time.perf_counter() - began)


async def updates(device: str) -> None:
    """Time the updates of a model of 250 MB in float32."""
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory) / "m"
        make_tiny_model(model, (), width=1024, layers=6, warm_start_steps=0)
        writer = SharedMemoryWriter() if device == "cpu" else CudaIpcWriter(torch.device(device, 0))
        tried = EngineUnderTest(engine=engine(model, device, cache_mib=256), model=model, writer=writer)
        await tried.update()
        weights = tried.publish(tried.version)
        elsewhere = partial(torch.ones, weights.nbytes, dtype=torch.uint8, device=device)
        source = block(weights) if device == "cpu" else elsewhere()  # a handle is for other processes
        target = torch.empty_like(source)
        memcpy, seconds = [], []
        torch.set_num_threads(1)
        for _ in range(ROUNDS + 1):
            began = time.perf_counter()
            target.copy_(source)
            if device != "cpu":
                torch.cuda.synchronize()
            memcpy.append(time.perf_counter() - began)
            began = time.perf_counter()
            await tried.engine.update_weights(weights)
            seconds.append(time.perf_counter() - began)
        line(f"{weights.nbytes / 2**20:.0f} MiB: seconds to copy them", min(memcpy))
        paused = said(model.parent)[-ROUNDS:]
        line("weights verified and updated: times a copy", min(seconds[1:]) / min(memcpy))
        line("weights updated (decoding pauses): times a copy", min(paused) / min(memcpy), 1.3, at_most=True)
        asked = requests(64, 48)
        began = time.perf_counter()
        running = asyncio.ensure_future(tried.engine.generate(asked))
        await running
        step = (time.perf_counter() - began) / 48
        line("pause: decoding steps of 64 rows", min(paused) / step, 1.0, at_most=True)
        await tried.engine.aclose()


def said(directory: Path) -> list[float]:
    """Seconds without decoding of each update, as the engine's log says."""
    text = (directory / "engine-vllm.log").read_text()
    return [float(seconds) for seconds in re.findall(r"([\d.]+) s without decoding", text)]


async def measure(device: str, model: Path | None) -> None:
    with tempfile.TemporaryDirectory() as directory:
        chosen = model or make_test_model(Path(directory))
        tried = EngineUnderTest(engine=engine(chosen, device), model=chosen)
        await tried.update()
        await logprobs(tried, "float32", 1e-4)
        await throughput(tried, chosen, device)
        await restart(tried)
        await tried.engine.aclose()
        coarse = EngineUnderTest(engine=engine(chosen, device, dtype="bfloat16"), model=chosen)
        await coarse.update()
        await logprobs(coarse, "bfloat16", None)
        await coarse.engine.aclose()
    await updates(device)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--model", type=Path)
    parser.add_argument("--direct", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        print("vLLM is not installed: make install-vllm")
    elif options.direct:
        serve_directly(str(options.model), options.device)
    else:
        torch.set_num_threads(1)
        asyncio.run(measure(options.device, options.model))


if __name__ == "__main__":
    main()
