"""``grpo-core explain`` on real runs: ``grpo-core train`` on the CPU, with one real fault each.

    python tests/benchmarks/bench_explain_real.py --output explain_real.json

The faults are in the environments of ``broken_environments.py``, in the configuration, or done to the
processes.  No rule was written on these runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from attrs import field, frozen

HERE = Path(__file__).parent
GRPO = Path(sys.executable).with_name("grpo-core")
BASE = {
    "trainer.steps": 10,
    "trainer.prompts_per_step": 8,
    "trainer.updates_per_step": 1,
    "trainer.lr": 3e-4,
    "trainer.threads": 1,
    "rollout.group_size": 4,
    "rollout.max_tokens": 8,
    "model.options.warm_start_steps": 40,
    "validation.every": 0,
    "validation.at_start": False,
    "checkpoint.every": 6,
}


def kill_children(run: Path, process: subprocess.Popen[bytes]) -> None:
    """Kill the process of the engine whenever it is there, for as long as the run lasts."""
    while process.poll() is None:
        time.sleep(1.0)
        if (run / "rollouts").is_dir() and any((run / "rollouts").iterdir()):
            _kill(process.pid, "engine")


def kill_the_run(run: Path, process: subprocess.Popen[bytes]) -> None:
    """Kill the run in its midst."""
    while process.poll() is None:
        time.sleep(0.2)
        if len(list((run / "rollouts").glob("step-*"))) >= 8:
            process.kill()


def _kill(parent: int, log: str) -> None:
    """Kill the children of a process that write to a log whose name begins like this."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    for child in children:
        with contextlib.suppress(OSError):
            opened = [os.readlink(file) for file in Path(f"/proc/{child}/fd").iterdir()]
            if any(Path(file).name.startswith(log) for file in opened):
                os.kill(int(child), signal.SIGKILL)


@frozen
class Fault:
    """A fault, and the causes that are right answers."""

    name: str
    right: Sequence[str]
    environment: str = "Repeat"
    settings: dict[str, object] = field(factory=dict)
    during: Callable[[Path, subprocess.Popen[bytes]], None] | None = None


FAULTS = (
    Fault("healthy", ["healthy"]),
    Fault("the judge pays nothing", ["warned"], "Zero"),
    Fault("the judge pays for everything", ["warned"], "Full"),
    Fault("the judge always pays a half", ["warned"], "Half"),
    Fault("a fifth of the rewards is NaN", ["rollouts_unscored"], "NotANumber"),
    Fault("a fifth of the replies is not judged", ["rollouts_unscored"], "Silent"),
    Fault("evaluate raises", ["environment_raises"], "Raising", {"environment.max_error_rate": 1.0}),
    Fault("the environment crashes", ["process_dies"], "Crashing"),
    Fault(
        "a fifth of the prompts cannot be judged",
        ["prompts_never_scored"],
        "Poisoned",
        {"environment.max_error_rate": 1.0},
    ),
    Fault("the judge is slow", ["environment_is_the_bottleneck"], "Slow"),
    Fault("solutions do not fit", ["warned"], "LongSolutions"),
    Fault("three prompts", ["few_different_prompts"], "Few", {"trainer.steps": 12}),
    Fault("validation on training prompts", ["warned"], "Leaking", {"validation.every": 6}),
    Fault("prompts beyond the model's positions", ["warned"], "LongPrompts"),
    Fault("a learning rate of 10", ["learning_rate_too_high"], settings={"trainer.lr": 10.0}),
    Fault("a learning rate of 0.05", ["learning_rate_too_high"], settings={"trainer.lr": 0.05}),
    Fault("a learning rate of 1e-12", ["learning_rate_too_low"], settings={"trainer.lr": 1e-12}),
    Fault("max_tokens = 1", ["warned"], settings={"rollout.max_tokens": 1}),
    Fault("a clip of 1e-6", ["gradient_clip_too_small"], settings={"trainer.max_grad_norm": 1e-6}),
    Fault(
        "24 updates in a step",
        ["too_many_updates"],
        settings={"trainer.updates_per_step": 24, "trainer.lr": 3e-3},
    ),
    Fault(
        "validation at each step, paused",
        ["validation_blocks"],
        settings={
            "validation.every": 1,
            "validation.pause": True,
            "validation.prompts": 12,
            "validation.options.n": 8,
        },
    ),
    Fault(
        "the engine is killed every second",
        ["process_dies"],
        settings={"trainer.steps": 40},
        during=kill_children,
    ),
    Fault("healthy, another seed", ["healthy"], settings={"seed": 5}),
    Fault("the run is killed", ["killed"], settings={"trainer.steps": 40}, during=kill_the_run),
)


def named(fault: Fault, directory: Path) -> list[str]:
    """Make the run, and return the causes that are named."""
    run = directory / fault.name.replace(" ", "-").replace(",", "")
    file = HERE / "broken_environments.py"
    settings = {"tasks.repeat.env": f"{file}:{fault.environment}", **BASE, **fault.settings}
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    with (directory / "output").open("wb") as output:
        process = subprocess.Popen(
            [GRPO, "train", "--output", run, "--quiet", *words],
            stdout=output,
            stderr=output,
        )
        if fault.during is not None:
            fault.during(run, process)
        process.wait(timeout=600)
    told = subprocess.run([GRPO, "explain", run, "--json"], capture_output=True, text=True, check=False)
    if told.returncode:
        print((directory / "output").read_text()[-2000:], told.stderr)
        return ["no run"]
    return [finding["cause"] for finding in json.loads(told.stdout)["findings"]]


def main() -> int:
    """Print the causes that are named, and how many are right."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of faults")
    parser.add_argument("--output", type=Path, help="file for the figures")
    parser.add_argument("--keep", type=Path, help="directory for the runs")
    given = parser.parse_args()
    table: dict[str, dict[str, object]] = {}
    with tempfile.TemporaryDirectory(prefix="grpo-core-") as scratch:
        directory = given.keep or Path(scratch)
        directory.mkdir(exist_ok=True)
        for fault in FAULTS:
            if given.only and fault.name not in given.only:
                continue
            found = named(fault, directory)
            right = (found[:1] or ["healthy"])[0] in fault.right
            table[fault.name] = {"right": right, "expected": list(fault.right), "named": found}
            print(
                f"{'right' if right else 'WRONG':6s} {fault.name}: {', '.join(found) or 'nothing found'}",
                flush=True,
            )
    faults = [row for row in table.values() if row["expected"] != ["healthy"]]
    right = sum(bool(row["right"]) for row in faults)
    print(f"explain/real faults: {right} of {len(faults)}  limit 85%")
    if given.output is not None:
        given.output.write_text(json.dumps(table, indent=1) + "\n")
    return int(right < 0.85 * len(faults))


if __name__ == "__main__":
    sys.exit(main())
