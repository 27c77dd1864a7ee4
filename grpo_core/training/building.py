"""Chooses how a model is held in training, and reads what was saved of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from attrs import evolve

from grpo_core.config import ModelConfig
from grpo_core.training.model import FullModel, Model, ModelSource
from grpo_core.weights.layout import LowRankSum, load_tensors


def build_model(source: ModelSource) -> Model:
    """Load a model as its configuration says.  Raises ModelError."""
    if source.config.lora is not None:
        from grpo_core.training.lora import LoraModel  # it imports peft, which takes a second

        return LoraModel.build(source)
    return FullModel.build(source)


def saved_tensors(
    model: Path, adapters: Path | None, config: ModelConfig
) -> tuple[Sequence[tuple[str, torch.Tensor | LowRankSum]], str]:
    """Read what engines load of a model, and of adapters that were saved for it.

    Returns the tensors, and the directory of the model to which engines add adapters; "" if they take all
    weights.  Raises ModelError.
    """
    if adapters is None:
        return load_tensors(model), ""
    from grpo_core.training.lora import LoraModel

    source = ModelSource(start=str(model), saved=adapters, config=config, device=torch.device("cpu"))
    made = LoraModel.build(source)
    return made.published(), made.base


def write_merged(model: Path, adapters: Path, config: ModelConfig, directory: Path) -> None:
    """Write the sum of a model and of adapters that were saved for it.  Raises ModelError."""
    from grpo_core.training.lora import LoraModel

    exact = evolve(config, dtype="float32")  # a sum in bfloat16 would lose small changes
    source = ModelSource(start=str(model), saved=adapters, config=exact, device=torch.device("cpu"))
    LoraModel.build(source).write_merged(directory)
