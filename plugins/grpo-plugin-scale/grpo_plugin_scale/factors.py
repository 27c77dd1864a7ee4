"""Files of adapters, as peft reads them; peft itself is not needed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from grpo_core import ModelError, errors
from grpo_core.weights import layout

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""Files of adapters in peft."""


def read(directory: Path) -> dict[str, Tensor]:
    """Read saved adapters, as their trainer continues with them.  Raises ModelError."""
    path = directory / FILE
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path}: the adapters cannot be read ({errors.one_line(error)})") from error
    return tensors


def published(tensors: Mapping[str, Tensor], scale: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return saved adapters as they are published: multiplied by their scale, in a dtype."""

    def factor(name: str, tensor: Tensor) -> Tensor:
        whole = tensor * scale if ".lora_B." in name else tensor
        return layout.cast_weights(whole, torch.empty(whole.shape, dtype=dtype))

    return {name: factor(name, tensor) for name, tensor in tensors.items()}


def write_published(saved: Path, directory: Path, dtype: torch.dtype | None) -> None:
    """Write saved adapters as they were published in a dtype; None: they were not, but their sums were."""
    shutil.copytree(saved, directory, dirs_exist_ok=True, ignore=shutil.ignore_patterns("published.json"))
    if dtype is None:
        return
    about = json.loads((saved / CONFIG).read_text(encoding="utf-8"))
    tensors = published(read(saved), about["lora_alpha"] / about["r"], dtype)
    save_file(tensors, directory / FILE, metadata={"format": "pt"})
    text = json.dumps({**about, "lora_alpha": about["r"]}, indent=2)  # published factors contain the scale
    (directory / CONFIG).write_text(f"{text}\n", encoding="utf-8")
