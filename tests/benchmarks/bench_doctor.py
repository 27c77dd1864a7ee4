"""The memory that ``grpo-core doctor`` predicts, next to the memory that a run takes, for three models.

    python tests/benchmarks/bench_doctor.py [19M] [40M] [100M]

Makes a model with random weights, asks ``grpo-core doctor``, then trains three steps with checkpoints and
reads the peak of resident memory of each process (``VmHWM`` in ``/proc/PID/status``) until the run ends.
Engines map the trainer's published weights, which count once: with the trainer.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

GRPO = Path(sys.executable).with_name("grpo-core")
LIMIT = 0.1
"""Largest difference of a prediction, as a share of what was measured."""
MODELS = {
    "19M": {"vocab_size": 32000, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 4,
            "num_attention_heads": 6, "num_key_value_heads": 6},
    "40M": {"vocab_size": 8000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 11,
            "num_attention_heads": 8, "num_key_value_heads": 4},
    "100M": {"vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 11,
             "num_attention_heads": 12, "num_key_value_heads": 12},
}  # fmt: skip
CONFIG = """
[model]
path = "{model}"

[tasks.numbers]
env = "{environment}:Numbers"

[rollout]
group_size = 8
max_tokens = 96
max_total_tokens = 128

[trainer]
steps = 3
prompts_per_step = 8

[checkpoint]
every = 2

[validation]
every = 0

[health]
canary_tolerance = 1.0
"""
ENVIRONMENT = """
import grpo_core as grpo

class Numbers(grpo.Environment):
    def prompts(self, split):
        return [grpo.Prompt(messages=f"{i:030d}=", answer=str(i)) for i in range(100)]
    def evaluate(self, episodes):
        return [float(len(set(each.reply))) for each in episodes]
"""


def make_model(directory: Path, shape: dict[str, int]) -> None:
    """Write a random model with the tiny model's tokenizer; most of its tokens are unused."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from grpo_core.demo.tiny import write_tokenizer

    config = LlamaConfig(
        **shape, max_position_embeddings=512, tie_word_embeddings=True, pad_token_id=0, bos_token_id=None,
        eos_token_id=1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    write_tokenizer(directory)


def predict(config: Path) -> dict[str, int]:
    """Return the bytes that the doctor predicts, by process; all processes of a kind together."""
    begun = time.perf_counter()
    done = subprocess.run([GRPO, "doctor", config, "--json"], capture_output=True, text=True)
    memory = json.loads(done.stdout)["memory"]
    print(f"doctor took {time.perf_counter() - begun:.1f} s")
    found: dict[str, int] = {}
    for part in memory["parts"]:
        print(f"    {part['process']:<12} {part['name']:<22} {part['bytes'] / 1e6:8.1f} MB")
        found[part["process"]] = found.get(part["process"], 0) + part["bytes"] * part["count"]
    return found


def measure(config: Path, run: Path) -> dict[str, int]:
    """Return the peaks of resident memory, by process, and the largest sum of all at one time."""
    process = subprocess.Popen(
        [GRPO, "train", config, "--output", run], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    peaks: dict[int, int] = {}
    names: dict[int, str] = {process.pid: "main"}
    at_once = 0
    while process.poll() is None:
        pids = [process.pid, *children(process.pid)]
        now = 0
        for pid in pids:
            status = fields(pid)
            if "VmHWM" in status:
                peaks[pid] = max(peaks.get(pid, 0), status["VmHWM"])
                now += status["RssAnon"] + status["RssFile"]
                now += status["RssShmem"] if names.get(pid) == "trainer" else 0
            if pid not in names and (name := log_of(pid)):
                names[pid] = name
        at_once = max(at_once, now)
        time.sleep(0.02)
    if process.returncode:
        raise SystemExit(process.stderr.read().decode() if process.stderr else "failed")
    found: dict[str, int] = {"(largest sum at one time)": at_once}
    for pid, peak in peaks.items():
        found[names.get(pid, "?")] = found.get(names.get(pid, "?"), 0) + peak
    return found


def children(pid: int) -> list[int]:
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    except OSError:
        return []
    return [int(each) for each in text.split()]


def log_of(pid: int) -> str:
    """Tell a process by its log: trainer, engine or environment."""
    try:
        name = Path(os.readlink(f"/proc/{pid}/fd/1")).stem
    except OSError:
        return ""
    kind = name.partition("-")[0]  # trainer.log, engine-NAME.log, environment-TASK.log
    return kind if kind in ("trainer", "engine", "environment") else ""


def fields(pid: int) -> dict[str, int]:
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return {}
    return {match[1]: int(match[2]) << 10 for match in re.finditer(r"^(\w+):\s+(\d+) kB$", text, re.M)}


def main() -> int:
    wanted = [word for word in sys.argv[1:] if word in MODELS] or list(MODELS)
    failed = 0
    for name in wanted:
        with tempfile.TemporaryDirectory() as scratch:
            here = Path(scratch)
            make_model(here / "model", MODELS[name])
            (here / "numbers.py").write_text(ENVIRONMENT)
            config = here / "config.toml"
            config.write_text(CONFIG.format(model=here / "model", environment=here / "numbers.py"))
            predicted, measured = predict(config), measure(config, here / "run")
            shared = os.path.getsize(here / "model" / "model.safetensors")
            measured["engine"] -= shared  # the trainer's block, which it maps
            measured["total"] = sum(v for k, v in measured.items() if not k.startswith("("))
            predicted["total"] = sum(predicted.values())
            for part, value in measured.items():
                if part not in predicted:
                    print(f"{f'{name}, {part}':<44} {'':>14} measured {value / 1e6:8.1f} MB")
                    continue
                error = predicted[part] / value - 1
                good = abs(error) <= LIMIT or part not in ("trainer", "total")
                failed += not good
                print(
                    f"{f'{name}, {part}':<44} predicted {predicted[part] / 1e6:8.1f} MB, "
                    f"measured {value / 1e6:8.1f} MB  {error:+.1%}  {'' if good else 'short'}",
                    flush=True,
                )
    return failed


if __name__ == "__main__":
    sys.exit(main())
