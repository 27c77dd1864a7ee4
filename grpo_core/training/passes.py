"""How the passes of a model are computed: activations, packing, compiled layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from attrs import frozen
from torch import nn

from grpo_core.config import ActivationsChoice, TrainerConfig
from grpo_core.contracts.errors import ModelError
from grpo_core.models.files import keep_softcapping

Around = Callable[[], AbstractContextManager[Any]]
"""Makes the context in which a forward pass is computed."""


@frozen(kw_only=True)
class Passes:
    """The choices of ``TrainerConfig`` for forward and backward passes."""

    activations: ActivationsChoice = "keep"
    packing: bool = False
    compiled: bool = False
    copies: bool = False
    """Whether layers compute with bfloat16 copies of their weights."""

    @classmethod
    def of(cls, config: TrainerConfig) -> Passes:
        return cls(
            activations=config.activations,
            packing=config.packing is True or (config.packing == "auto" and not config.compile),
            compiled=config.compile,
        )

    @staticmethod
    def layers_of(model: nn.Module) -> list[nn.Module]:
        """Return the layers of a transformers model, each of which a device holds as a whole."""
        names = set(getattr(model, "_no_split_modules", None) or ())
        return [part for part in model.modules() if type(part).__name__ in names]

    def around(self, device: torch.device) -> Around:
        """Return the context of forward passes on a device: it offloads saved tensors if that is chosen.

        Recomputed layers keep only their inputs, so only these are moved.
        """
        if self.activations == "offload" and device.type != "cpu":
            return partial(torch.autograd.graph.save_on_cpu, pin_memory=True)
        return nullcontext


def for_training(model: Any, passes: Passes) -> nn.Module:
    """Set up a transformers model for the trainer: no dropout, and layers as in ``passes``."""
    keep_softcapping(model)
    _round_experts()
    # The engine samples without dropout; with it the trainer would score another policy.
    for module in model.modules():
        for name in ("p", "dropout", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    model.eval()
    if passes.activations != "keep":
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": False})
        for module in model.modules():
            # transformers computes these again in training mode only; what is in them stays out of it, since
            # there routers of experts draw noise, with which the engine does not sample
            if getattr(module, "gradient_checkpointing", False):
                module.training = True
    if passes.compiled:
        layers = passes.layers_of(model)
        if not layers:
            raise ModelError(
                f"trainer.compile = true: {type(model).__name__} does not say which modules are its layers; "
                "leave it out"
            )
        for layer in layers:
            layer.compile(dynamic=True)
    typed: nn.Module = model
    return typed


@cache
def _round_experts() -> None:
    """Let autocast round the products of stacked experts; torch's covers linear layers only.

    Otherwise experts would compute in float32, without tensor cores, and engines in bfloat16.
    """
    for library, name in ((torch.ops.aten, "_grouped_mm"), (torch.ops.transformers, "grouped_mm_fallback")):
        for device in ("cpu", "cuda") if hasattr(library, name) else ():
            torch.library.register_autocast(f"{library.name}::{name}", device, torch.bfloat16)
