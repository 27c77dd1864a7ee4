"""The model ``tinker:NAME``: weights at the service, tokenizer on this machine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_core import ModelError
from grpo_core.kit import ModelRequest, StartModel, files

FILES = ("*.json", "*.txt", "*.model", "*.jinja", "*.py")
"""Patterns of a model's files except its weights."""
STATE = "tinker.json"
"""File of a checkpoint with the path of the state at the service."""


class HostedModel:
    """A model of the service; only its configuration and tokenizer are loaded here.

    Args:
        name: name of the model at the service: a hub id, or a directory on the service's machine.
        tokenizer: hub id or directory of the tokenizer, if it is not ``name``.
    """

    def __init__(self, name: str, *, tokenizer: str = "") -> None:
        self._name, self._tokenizer = name, tokenizer or name

    @property
    def preset(self) -> Mapping[str, Any]:
        return {
            "engine": {"name": "tinker"},
            "trainer": {"name": "tinker", "options": {"base_model": self._name}, "lr": 1e-4},
        }

    def check(self) -> None:
        """Accept; the service reports a missing model at the start."""

    async def start_model(self, request: ModelRequest) -> StartModel:
        """Return the directory of the tokenizer.  Raises ModelError if there is none."""
        path = await asyncio.to_thread(self._directory)
        positions = await asyncio.to_thread(files.size_of, path, "max_position_embeddings")
        return StartModel(path=path, positions=positions, doing=f"connecting to the service for {self._name}")

    def _directory(self) -> str:
        if (directory := Path(os.path.expanduser(self._tokenizer))).is_dir():
            return str(directory)
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils.tqdm import disable_progress_bars

        disable_progress_bars()  # they would break the live view
        try:
            return str(snapshot_download(self._tokenizer, allow_patterns=list(FILES)))
        except Exception as error:
            raise ModelError(
                f"model 'tinker:{self._name}': the hub does not give the tokenizer {self._tokenizer!r}: "
                f"{str(error).strip()[:300]}; model.options.tokenizer names another"
            ) from error
