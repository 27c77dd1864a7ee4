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
from grpo_core.storage.published import Published

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from grpo_core.training.model import Model, ModelSource
    from grpo_core.weights.layout import LowRankSum


@runtime_checkable
class TrainedSection(ModelSection, Protocol):
    """A ``ModelSection`` with which the trainer ``torch`` makes its model."""

    def build_model(self, source: ModelSource) -> Model:
        """Load the model, with its saved part if the source names one.  Raises ModelError."""
        ...

    def write_part(self, saved: Path, directory: Path, dtype: torch.dtype) -> None:
        """Write the saved part, which was published in a dtype, as peft loads it; the model is not needed."""
        ...

    def write_whole(self, source: ModelSource, directory: Path, dtype: torch.dtype) -> float:
        """Write the saved part as a whole model, for transformers; return the share of it that is left.

        In a 16-bit dtype small changes are rounded away.  Raises ModelError.
        """
        ...


def trained_section(config: WithSections) -> TrainedSection | None:
    """Return the section that defines how the trainer holds its model; None: it trains all weights."""
    section = model_section(config)
    return section if isinstance(section, TrainedSection) else None


def saved_tensors(
    model: Path, part: Path | None, config: Config
) -> tuple[Sequence[tuple[str, Tensor | LowRankSum]], str, torch.dtype | None]:
    """Read the tensors that engines load, from a model and its saved part, such as adapters.

    Returns the tensors, the directory of the model to which engines add them ("" if they take all weights),
    and the dtype in which they were published (None: their own).  Raises ModelError.
    """
    from grpo_core.weights.layout import load_tensors

    if part is None:
        return load_tensors(model), "", None
    source = _source(model, part, config.model)
    made = _section(config).build_model(source)
    return made.published(), made.base, source.published


def write_part(part: Path, config: Config, directory: Path) -> None:
    """Write the saved part of a model as engines got it, as peft loads it.  Raises ModelError."""
    import torch

    record = Published.read(part)
    dtype = torch.float32 if record is None else getattr(torch, record.sent)
    _section(config).write_part(part, directory, dtype)


def write_whole(model: Path, part: Path, config: Config, directory: Path, dtype: str) -> float:
    """Write a model with its saved part as transformers loads it, in the dtype of the engine's sums.

    Args:
        dtype: another dtype; "" is the engine's, or float32 if it kept both apart.

    Returns the share of the change that is left in that dtype.  Raises ModelError.
    """
    import torch

    exact = evolve(config.model, dtype="float32")  # bfloat16 would lose small changes
    record = Published.read(part)
    chosen = dtype or (record and record.merged) or "float32"
    return _section(config).write_whole(_source(model, part, exact), directory, getattr(torch, chosen))


def _section(config: Config) -> TrainedSection:
    section = trained_section(config)
    assert section is not None, "part of a model was saved, but no section says how to read it"
    return section


def _source(model: Path, part: Path, section: ModelConfig) -> ModelSource:
    import torch

    from grpo_core.training.model import ModelSource

    record = Published.read(part)
    return ModelSource(
        start=str(model),
        saved=part,
        published=None if record is None else getattr(torch, record.sent),
        config=section,
        device=torch.device("cpu"),
    )
