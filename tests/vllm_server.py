"""Starts a real vLLM server on this machine's CPU."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


@contextlib.contextmanager
def vllm_server(
    model: Path, arguments: Sequence[str], log: Path, env: Mapping[str, str], *, seconds: float = 120.0
) -> Iterator[str]:
    """Yield the address of a server of a model, once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [
                *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
                *("--model", str(model), "--host", "127.0.0.1", "--port", str(port), *arguments),
            ],
            env=os.environ | ENVIRONMENT | env,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        _wait_for(f"http://127.0.0.1:{port}/health", process, log, seconds)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path, seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(log.read_text()[-3000:])
