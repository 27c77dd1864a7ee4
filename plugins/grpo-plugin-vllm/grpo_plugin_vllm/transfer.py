"""The weight transfer to vLLM: its API for RL, with a backend that reads published weights.

vLLM loads the backend in each of its processes by the entry point ``vllm.general_plugins``.  It receives a
``grpo_core.Weights`` as a table; the bytes are copied once, from the trainer's block (or the received block
of ``collective``) into the model's parameters.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from attrs import asdict

from grpo_core import Weights
from grpo_core.kit import typed

if TYPE_CHECKING:
    import torch

BACKEND = "grpo_core"
PLAIN_LINEAR = "GRPO_CORE_VLLM_PLAIN_LINEAR"
"""Environment variable for vLLM on a CPU: "1" makes linear layers use the parameters directly.

By default vLLM uses repacked copies, which cannot be updated in place; the copy of an output layer that is
tied to the embeddings would even keep the old weights.  Experts are repacked once, so that later updates
would be in the wrong layout.
"""

LAYERWISE = "GRPO_CORE_VLLM_LAYERWISE"
"""Environment variable for tests on a CPU: "1" loads weights layer by layer, as on a GPU."""


def as_table(weights: Weights) -> dict[str, Any]:
    """Return the description of weights for the backend, as values for msgpack or JSON."""
    return asdict(weights, filter=lambda each, _: each.name != "canary")


def from_table(table: Mapping[str, Any]) -> Weights:
    return typed.converter().structure(table, Weights)


def rank_of(weights: Weights) -> int:
    """Return the rank of published adapters."""
    return max(info.shape[0] for info in weights.tensors if info.name.endswith(".lora_A.weight"))


def difference(given: Weights, held: Weights) -> str:
    """Describe differences in names and shapes between new and current weights; "" if there are none."""
    new = {info.name: tuple(info.shape) for info in given.tensors}
    old = {info.name: tuple(info.shape) for info in held.tensors}
    differences = [f"missing: {name}" for name in old if name not in new]
    differences += [f"unknown: {name}" for name in new if name not in old]
    differences += [
        f"{name} is {new[name]}, expected {old[name]}"
        for name in new
        if old.get(name, new[name]) != new[name]
    ]
    return "; ".join(differences[:10])


def register() -> None:
    """Register the backend; vLLM calls this in each process, possibly several times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "grpo_plugin_vllm.worker", "Backend")
    if os.environ.get(PLAIN_LINEAR) == "1" and current_platform.is_cpu():
        import vllm.model_executor.layers.utils as layers

        layers.dispatch_cpu_unquantized_gemm = _plain_linear
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts as Experts

        Experts.process_weights_after_loading = _as_loaded
        Experts.apply = _plain_experts


def _plain_linear(layer: torch.nn.Module, remove_weight: bool) -> None:
    from torch.nn.functional import linear

    layer.cpu_linear = linear  # type: ignore[assignment]


def _as_loaded(experts: Any, layer: torch.nn.Module) -> None:
    """Keep the experts' weights in the loaded layout."""


def _plain_experts(
    experts: Any,
    *,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    apply_router_weight_on_input: bool,
    **_: Any,
) -> None:
    """Compute the experts' outputs for the tokens routed to them."""
    from torch.nn.functional import linear
    from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation

    output.zero_()
    for expert in sorted(set(topk_ids.flatten().tolist())):
        tokens, choice = (topk_ids == expert).nonzero(as_tuple=True)
        both = linear(hidden_states[tokens], w1[expert], _of(experts.w1_bias, expert))
        inner = both.new_empty(len(both), w2.shape[-1])
        apply_moe_activation(activation, inner, both)
        result = linear(inner, w2[expert], _of(experts.w2_bias, expert))
        if not apply_router_weight_on_input:  # otherwise the hidden states are weighted already
            result = result * topk_weights[tokens, choice, None].to(result.dtype)
        output.index_add_(0, tokens, result.to(output.dtype))


def _of(bias: torch.Tensor | None, expert: int) -> torch.Tensor | None:
    return None if bias is None else bias[expert]
