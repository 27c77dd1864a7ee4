"""A trainer and an engine that call a training service with Tinker's protocol."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core import EngineOffer, TrainerOffer, hookimpl
from grpo_plugin_tinker.section import TinkerConfig


@hookimpl
def grpo_config_sections() -> Mapping[str, object]:
    return {"tinker": TinkerConfig}


@hookimpl
def grpo_engines() -> Mapping[str, EngineOffer]:
    return {
        "tinker": EngineOffer(
            "grpo_plugin_tinker.engine:TinkerEngine", check="grpo_plugin_tinker.checks:of_engine"
        )
    }


@hookimpl
def grpo_trainers() -> Mapping[str, TrainerOffer]:
    return {
        "tinker": TrainerOffer(
            "grpo_plugin_tinker.trainer:TinkerTrainer", check="grpo_plugin_tinker.checks:of_trainer"
        )
    }


@hookimpl
def grpo_models() -> Mapping[str, str]:
    return {"*": "grpo_plugin_tinker.model:HostedModel"}
