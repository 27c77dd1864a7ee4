"""Checks what only a GPU can show, and writes one JSON file with expectations beside results.

    make gpu-check          # the trainer, FSDP, the engine `local`, a whole run; no vLLM needed
    make gpu-check-vllm     # the engine `vllm`
    python tests/benchmarks/gpu_check.py [--vllm] [--device cuda|cpu] [--output FILE] [CHECK ...]

Each ends with the tests marked `gpu`.  After each check no other process may hold the GPU, as far as
nvidia-smi names processes.
On a CPU (``--device cpu``) the same checks run with fewer transports, which tests this script.
Ends with status 1 if a check fails.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from attrs import asdict, evolve, frozen

from grpo_core import __version__
from grpo_core.config import ModelConfig, TrainerConfig
from grpo_core.engines.local.engine import LocalEngine
from grpo_core.errors import EngineError
from grpo_core.records import Batch, EngineSetup, GenerationRequest, Row
from grpo_core.tokens import Tokens
from grpo_core.training.model import Model, ModelSource
from grpo_core.training.setup import TrainerSetup
from grpo_core.training.trainer import TorchTrainer
from grpo_core.weights.publishing import Writer
from grpo_core.weights.reading import read_weights
from grpo_core.weights.shm import SharedMemoryWriter
from grpo_plugin_devkit.decoding import ENGINE_LAWS, EngineUnderTest, make_test_model
from grpo_plugin_scale.training.group import Group
from grpo_plugin_scale.training.sharded import ShardedModel
from grpo_plugin_scale.weights.collective import CollectiveWriter
from grpo_plugin_scale.weights.cuda_ipc import CudaIpcWriter

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


def gpu_tests(*paths: str) -> tuple[str, str, bool]:
    """Run the tests that need a GPU; without one they are skipped."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "gpu", *paths]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [done.stderr[-500:]])[-1]
    return "pytest -m gpu ends with 0", f"{done.returncode}: {last}", done.returncode == 0


def _rows() -> tuple[Row, ...]:
    chance = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 90, (32, 100), generator=chance).tolist()
    tokens = [Tokens.generated(row, [-4.5] * 100, [0] * 100) for row in ids]
    return tuple(
        Row(prompt_ids=(5, 6, 7), tokens=each, advantage=1.0 if i % 2 else -1.0, group=i // 8)
        for i, each in enumerate(tokens)
    )


def whole_run(engine: str, device: str, dtype: str) -> tuple[str, str, bool]:
    """Train `math:sort` from the command line, with trainer and engine on one device."""
    settings: dict[str, Any] = {
        "model.options.width": 128,
        "model.dtype": dtype,
        "trainer.device": device,
        "trainer.steps": 60,
        "validation.every": 60,
        "engine.options.device": device,
    }
    if engine == "vllm":
        settings |= {"engine.options.memory_fraction": 0.3} if device == "cuda" else {}
        settings |= {"engine.options.cache_mib": 64} if device == "cpu" else {}
    chosen = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    expected = f"exit status 0; accuracy + {LEARNS:.0%}; grpo-core verify holds"
    with tempfile.TemporaryDirectory() as directory:
        grpo = [sys.executable, "-m", "grpo_core"]
        arguments = ["train", "--env", "math:sort", "--engine", engine, *chosen, "--output", "run"]
        done = subprocess.run([*grpo, *arguments], cwd=directory, capture_output=True, text=True, check=False)
        if done.returncode:
            return expected, f"exit status {done.returncode}: {(done.stdout + done.stderr)[-2000:]}", False
        holds = subprocess.run([*grpo, "verify", "run"], cwd=directory, capture_output=True, check=False)
        events = map(json.loads, Path(directory, "run", "events.jsonl").read_text().splitlines())
        first, last = (e["results"]["sort"]["accuracy"] for e in events if e["event"] == "Validated")
    seen = f"accuracy {first:.1%} -> {last:.1%}; verify ended with {holds.returncode}"
    return expected, seen, last >= first + LEARNS and holds.returncode == 0


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


def checks(device: str, *, vllm: bool) -> Iterator[tuple[str, Check]]:
    dtypes = ("float32", "bfloat16")
    if vllm:
        yield from vllm_checks(device)
        yield from ((f"run with vllm, {d}", partial(whole_run, "vllm", device, d)) for d in dtypes)
        yield "tests marked gpu", partial(gpu_tests, "plugins/grpo-plugin-vllm/tests")
    else:
        yield from ((f"trainer, {d}", partial(trainer, device, d)) for d in dtypes)
        yield "FSDP on one rank", partial(fsdp_on_one_rank, device)
        yield from local_checks(device)
        yield from ((f"run with local, {d}", partial(whole_run, "local", device, d)) for d in dtypes)
        yield "tests marked gpu", partial(gpu_tests, "tests")


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
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--output", type=Path, help="gpu_check.json or gpu_check_vllm.json if left out")
    options = parser.parse_args()
    output = options.output or Path("gpu_check_vllm.json" if options.vllm else "gpu_check.json")
    if options.device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device here; --device cpu tests this script")
        return 1
    about: dict[str, Any] = {"device": "a CPU", "torch": torch.__version__, "grpo_core": __version__}
    before: set[str] = set()
    if options.device == "cuda":
        torch.zeros(1, device="cuda")  # this process holds the GPU from now on
        about |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
        before = holders()
        about["processes"] = "looked for after each check" if before else "nvidia-smi names none here"
    results: list[Result] = []
    for name, check in checks(options.device, vllm=options.vllm):
        if options.only and not any(word in name for word in options.only):
            continue
        results.append(run(name, partial(leaving_nobody, check, before) if before else check))
        about["results"] = [asdict(result) for result in results]
        output.write_text(json.dumps(about, indent=1) + "\n")  # each time: a later check may end the process
    return int(not all(result.ok for result in results))


if __name__ == "__main__":
    sys.exit(main())
