"""An engine that gets adapters, held to the laws of decoding with transformers' sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import define, evolve

from grpo_core.contracts.records import Weights
from grpo_core.weights.layout import LowRankSum
from grpo_core.weights.names import checkpoint_tensors
from grpo_core.weights.reading import LEFT, RIGHT, WEIGHT
from grpo_plugin_devkit.decoding import EngineUnderTest

RANK = 3
"""vLLM has room for rank 1, 8, 16 and so on: another one is filled up."""


@define(kw_only=True)
class AdaptedEngine(EngineUnderTest):
    """Versions are adapters of all linear layers, of the same model."""

    def sums(self, version: int) -> list[tuple[str, torch.Tensor | LowRankSum]]:
        generator = torch.Generator().manual_seed(version)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator) * 0.3

        return [
            (name, LowRankSum(tensor, random(len(tensor), RANK), random(RANK, tensor.shape[1])))
            if name.endswith("_proj.weight")
            else (name, tensor)
            for name, tensor in checkpoint_tensors(self.module).items()
        ]

    def tensors(self, version: int) -> list[tuple[str, torch.Tensor]]:
        return [
            (f"{name.removesuffix(WEIGHT)}{end}", factor)
            for name, tensor in self.sums(version)
            if isinstance(tensor, LowRankSum)
            for end, factor in ((RIGHT, tensor.right), (LEFT, tensor.left))
        ]

    def publish(self, version: int, *, without: str = "") -> Weights:
        return evolve(super().publish(version, without=without), base=str(self.model))

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int], version: int, temperature: float = 1.0) -> torch.Tensor:
        whole = {
            name: tensor.computed() if isinstance(tensor, LowRankSum) else tensor
            for name, tensor in self.sums(version)
        }
        logits = torch.func.functional_call(self.module, whole, (torch.tensor([ids]),)).logits[0]
        return torch.log_softmax(logits.float() / (temperature or 1), -1)
