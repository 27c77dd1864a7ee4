"""Losses, advantages, optimizers and validation strategies of published methods."""

from __future__ import annotations

import grpo_core as grpo


@grpo.hookimpl
def grpo_losses() -> dict[str, str]:
    names = ("distillation", "gspo", "cispo", "sapo", "vespo", "reinforce", "dppo")
    return {name: f"grpo_plugin_algorithms.losses:{name}" for name in names}


@grpo.hookimpl
def grpo_advantages() -> dict[str, str]:
    names = ("reinforce_plus_plus", "gdpo", "max_rl", "pass_at_k", "turns", "gigpo")
    return {name: f"grpo_plugin_algorithms.advantages:{name}" for name in names}


@grpo.hookimpl
def grpo_optimizers() -> dict[str, str]:
    names = ("adamw_8bit", "adamw_torchao", "muon")
    return {name: f"grpo_plugin_algorithms.optimizers:{name}" for name in names}


@grpo.hookimpl
def grpo_validation_strategies() -> dict[str, str]:
    return {
        "pass_at_k": "grpo_plugin_algorithms.strategies:PassAtK",
        "majority": "grpo_plugin_algorithms.strategies:Majority",
        "paired": "grpo_plugin_algorithms.paired:Paired",
    }
