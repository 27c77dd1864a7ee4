"""Resolves a model path or hub id to a local directory, and works around attention soft-capping."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from grpo_core.errors import ModelError

_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja", "*.py")


def local_directory(path: str) -> str:
    """Return the directory of a model; a hub id is downloaded once, into the hub's cache.

    Raises ModelError if there is no model at ``path``.
    """
    check_path(path)
    directory = Path(path).expanduser()
    return str(directory) if directory.is_dir() else _download(path)


def check_path(path: str) -> None:
    """Raise ModelError if ``path`` is neither a model's directory nor a possible hub id; ask no hub."""
    directory = Path(path).expanduser()
    if directory.is_dir():
        missing = [
            name for name in ("config.json", "tokenizer_config.json") if not (directory / name).exists()
        ]
        if not any(directory.glob("*.safetensors")):
            missing.append("*.safetensors")
        if missing:
            raise ModelError(
                f"model {path!r}: this directory holds no transformers model: there is no "
                + ", no ".join(missing)
            )
    elif directory.exists() or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise ModelError(
            f"model {path!r}: there is no such directory; expected a transformers model directory, a hub id "
            'like "Qwen/Qwen3-0.6B", or "tiny"'
        )


def _download(repository: str) -> str:
    from huggingface_hub import snapshot_download

    try:
        return str(snapshot_download(repository, allow_patterns=list(_PATTERNS)))
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ModelError(
            f"model {repository!r}: there is no such directory here, and the hub did not give it: {reason}"
        ) from error


UNKNOWN_SIZE = 2**31
"""A size that the model's configuration does not give."""


def size_of(directory: str, name: str) -> int:
    """Return a size of a model by its name in config.json; ``UNKNOWN_SIZE`` if it is not given.

    Raises ModelError for a file that is no configuration.
    """
    path = Path(directory, "config.json")
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        given = {**config, **config.get("text_config", {})}.get(name)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"model {directory!r}: {path.name} is no configuration: {str(error)[:200]}"
        ) from None
    return given if isinstance(given, int) and given > 0 else UNKNOWN_SIZE


def keep_softcapping(model: Any) -> None:
    """Use transformers' plain attention for models with soft-capped scores (Gemma 2).

    Several releases choose a fused kernel instead, which ignores the capping.
    """
    if getattr(model.config.get_text_config(), "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")
