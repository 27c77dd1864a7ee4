"""Training on several GPUs, LoRA, pools of engines, and weight transports for GPUs and clusters."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core import EngineOffer, Offer, TrainerOffer, Transport, hookimpl
from grpo_plugin_scale.config import ScaledConfig
from grpo_plugin_scale.lora import LoraConfig


@hookimpl
def grpo_config_sections() -> Mapping[str, object]:
    return {"model.lora": LoraConfig | None, "trainer": ScaledConfig}


@hookimpl
def grpo_engines() -> Mapping[str, EngineOffer]:
    return {"pool": EngineOffer("grpo_plugin_scale.engines.pool:pool_of", role="pools_engines")}


@hookimpl
def grpo_placements() -> Mapping[str, Offer]:
    return {"local": Offer("grpo_plugin_scale.placement:ScaledPlacement", extends_core=True)}


@hookimpl
def grpo_trainers() -> Mapping[str, TrainerOffer]:
    return {
        "torch": TrainerOffer(
            "grpo_plugin_scale.training.process:ScaledProcess",
            memory="grpo_plugin_scale.memory:memory",
            workers="grpo_plugin_scale.config:ranks",
            check="grpo_plugin_scale.config:check",
            scores=("start", "current", "ema", "model"),
            extends_core=True,
        )
    }


@hookimpl
def grpo_transports() -> Mapping[str, Transport | Offer]:
    return {
        "cuda_ipc": Transport(
            writer="grpo_plugin_scale.weights.cuda_ipc:writer",
            reader="grpo_plugin_scale.weights.cuda_ipc:read",
            several=False,
            same_gpu=True,
            on_device=True,
        ),
        "collective": Offer("grpo_plugin_scale.config:collective", role="crosses_machines"),
    }
