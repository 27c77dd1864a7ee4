"""The section ``model.lora``: trains adapters instead of the model's weights."""

from __future__ import annotations

import importlib.util
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from attrs import field, frozen
from attrs.validators import ge, gt, lt

from grpo_core import ConfigError
from grpo_plugin_scale.config import ScaledConfig

if TYPE_CHECKING:
    import torch

    from grpo_core.kit import Config, ModelSource
    from grpo_plugin_scale.training.lora import LoraModel


@frozen(kw_only=True)
class LoraConfig:
    """LoRA trains two small matrices for each chosen layer, the adapters, and freezes the model's weights.

    The section `[model.lora]`, empty or not, turns it on.
    """

    fixed: ClassVar = ("model.lora.rank", "model.lora.alpha", "model.lora.targets")

    rank: int = field(default=16, validator=ge(1))
    """Each adapter is a product of two matrices with this inner dimension."""
    alpha: float = field(default=32.0, validator=[gt(0), lt(inf)])
    """Adapters are multiplied by `alpha / rank`."""
    targets: list[str] = field(factory=list)
    """Names of the layers that get adapters, as in `["q_proj", "v_proj"]`; if the list is empty, all linear
    layers but the output layer."""
    dropout: float = field(default=0.0, validator=[ge(0), lt(1)])
    """Share of an adapter's inputs that are dropped in passes with a gradient; engines never drop any, so
    this adds noise to the ratios of the loss."""
    publish: Literal["adapters", "merged"] = "adapters"
    """A weight sync sends the adapters alone, which the engine adds to the model's files, or the sum of both
    ("merged"), for engines on machines without these files."""

    def check(self, config: Config) -> None:
        """Raise ConfigError if peft is not installed, or other keys conflict."""
        require_peft()
        scaled = config.section(ScaledConfig)
        for name, score in config.scores.items():
            if score.weights == "ema" and score.mix < 1:
                raise ConfigError(
                    f"scores.{name}.mix = {score.mix:g} mixes two sets of weights, which adapters "
                    "(model.lora) cannot hold; set it to 1, which copies them"
                )
            if score.weights == "ema" and scaled.divides:
                raise ConfigError(
                    f"{scaled.held}: with [model.lora] only the weights of the start are kept; set "
                    f'scores.{name}.weights = "start"'
                )

    def build_model(self, source: ModelSource) -> LoraModel:
        """Load the model with new or saved adapters.  Raises ModelError."""
        require_peft()
        from peft import LoraConfig as PeftConfig  # importing takes a second

        from grpo_plugin_scale.training.lora import LoraModel

        config = PeftConfig(
            task_type="CAUSAL_LM",
            base_model_name_or_path=source.start,
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.targets or "all-linear",
        )
        merged = self.publish == "merged"
        return LoraModel.build(source, config, targets=self.targets, merged=merged)

    def write_part(self, saved: Path, directory: Path, dtype: torch.dtype) -> None:
        """Write saved adapters as engines got them.  Raises ModelError."""
        from grpo_plugin_scale.factors import write_published

        write_published(saved, directory, None if self.publish == "merged" else dtype)

    def write_whole(self, source: ModelSource, directory: Path, dtype: torch.dtype) -> float:
        """Write the model merged with saved adapters; return the share of their change that is left.

        Raises ModelError.
        """
        return self.build_model(source).write_merged(directory, dtype)


def require_peft() -> None:
    """Raise ConfigError if peft is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("model.lora needs the package peft: pip install 'grpo-core[lora]'")
