"""Chooses how a model is held in training: with all weights, or as a plugin's section defines.

Imports no torch before a model is made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from attrs import evolve

from grpo_core.config import Config, ModelConfig
from grpo_core.contracts.records import WithSections
from grpo_core.plugins.configured import ModelSection, model_section

if TYPE_CHECKING:
    from torch import Tensor

    from grpo_core.training.model import Model, ModelSource
    from grpo_core.weights.layout import LowRankSum


@runtime_checkable
class TrainedSection(ModelSection, Protocol):
    """A ``ModelSection`` with which the trainer ``torch`` makes its model."""

    def build_model(self, source: ModelSource) -> Model:
        """Load the model, with its saved part if the source names one.  Raises ModelError."""
        ...

    def write_whole(self, source: ModelSource, directory: Path) -> None:
        """Write the saved part as a whole model, which transformers loads.  Raises ModelError."""
        ...


def trained_section(config: WithSections) -> TrainedSection | None:
    """Return the section that defines how the trainer holds its model; None: it trains all weights."""
    section = model_section(config)
    return section if isinstance(section, TrainedSection) else None


def saved_tensors(
    model: Path, part: Path | None, config: Config
) -> tuple[Sequence[tuple[str, Tensor | LowRankSum]], str, int]:
    """Read the tensors that engines load, from a model and its saved part, such as adapters.

    Returns the tensors, the directory of the model to which engines add them, and that model's number of
    parameters; "" and 0 if they take all weights.  Raises ModelError.
    """
    from grpo_core.weights.layout import load_tensors

    if part is None:
        return load_tensors(model), "", 0
    made = _section(config).build_model(_source(model, part, config.model))
    return made.published(), made.base, made.parameters


def write_whole(model: Path, part: Path, config: Config, directory: Path) -> None:
    """Write a model with its saved part, as transformers loads it.  Raises ModelError."""
    exact = evolve(config.model, dtype="float32")  # a sum in bfloat16 would lose small changes
    _section(config).write_whole(_source(model, part, exact), directory)


def _section(config: Config) -> TrainedSection:
    section = trained_section(config)
    assert section is not None, "part of a model was saved, but no section says how to read it"
    return section


def _source(model: Path, part: Path, config: ModelConfig) -> ModelSource:
    import torch

    from grpo_core.training.model import ModelSource

    return ModelSource(start=str(model), saved=part, config=config, device=torch.device("cpu"))
