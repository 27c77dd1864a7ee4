"""A machine with GPUs."""

from __future__ import annotations

import os
import stat

import pytest


@pytest.fixture
def two_gpus(tmp_path, monkeypatch):
    """A machine with two GPUs, as a stand-in for nvidia-smi reports it."""
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\n"
        'test "$1" = "--query-gpu=index,uuid,name,memory.total,memory.free,driver_version" || exit 1\n'
        'echo "0, GPU-aaaa, NVIDIA H200, 143771, 143000, 570.86.15"\n'
        'echo "1, GPU-bbbb, NVIDIA L4, 23034, 22000, 570.86.15"\n'
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
