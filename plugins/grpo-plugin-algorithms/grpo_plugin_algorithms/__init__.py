"""Losses, advantages, optimizers, filters and validation strategies of published methods."""

from __future__ import annotations

import grpo_core as grpo
from grpo_plugin_algorithms.shaping import ShapingConfig


@grpo.hookimpl
def grpo_config_sections() -> dict[str, type]:
    return {"shaping": ShapingConfig}


@grpo.hookimpl
def grpo_losses() -> dict[str, grpo.Offer | str]:
    names = ("distillation", "self_distillation", "gspo", "cispo", "sapo", "vespo", "dppo", "reinforce")
    further = {name: f"grpo_plugin_algorithms.losses:{name}" for name in names}
    return {"grpo": grpo.Offer("grpo_plugin_algorithms.losses:grpo", extends_core=True), **further}


@grpo.hookimpl
def grpo_advantages() -> dict[str, grpo.Offer]:
    home = "grpo_plugin_algorithms.advantages"
    by_turn = f"{home}:check_by_turn"
    return {
        "reinforce_plus_plus": grpo.Offer(f"{home}:reinforce_plus_plus", check=f"{home}:check_numbers"),
        "gdpo": grpo.Offer(f"{home}:gdpo", check=f"{home}:check_scaled_parts", parts=f"{home}:parts_of_gdpo"),
        "max_rl": grpo.Offer(f"{home}:max_rl"),
        "pass_at_k": grpo.Offer(f"{home}:pass_at_k", check=f"{home}:check_pass_at_k"),
        "turns": grpo.Offer(f"{home}:turns", check=by_turn),
        "gigpo": grpo.Offer(f"{home}:gigpo", check=by_turn),
    }


@grpo.hookimpl
def grpo_optimizers() -> dict[str, grpo.OptimizerOffer]:
    home = "grpo_plugin_algorithms.optimizers"
    eps = f"{home}:check_eps"
    return {
        "adamw_8bit": grpo.OptimizerOffer(
            f"{home}:adamw_8bit",
            requires={"bitsandbytes": "pip install 'grpo-core[optimizers]'"},
            check=eps,
            state=f"{home}:adamw_8bit_state",
        ),
        "adamw_torchao": grpo.OptimizerOffer(
            f"{home}:adamw_torchao",
            requires={"torchao": "pip install 'grpo-core[torchao]'"},
            check=eps,
            state=f"{home}:adamw_torchao_state",
            restored=f"{home}:adamw_torchao_restored",
        ),
        "muon": grpo.OptimizerOffer(f"{home}:muon", check=f"{home}:check_muon", state=f"{home}:muon_state"),
    }


@grpo.hookimpl
def grpo_validation_strategies() -> dict[str, str]:
    return {
        "pass_at_k": "grpo_plugin_algorithms.strategies:PassAtK",
        "majority": "grpo_plugin_algorithms.strategies:Majority",
        "paired": "grpo_plugin_algorithms.paired:Paired",
    }


@grpo.hookimpl
def grpo_filters() -> dict[str, grpo.Offer]:
    home = "grpo_plugin_algorithms.filters"
    names = ("pass_rate", "mean_length")
    return {name: grpo.Offer(f"{home}:{name}", check=f"{home}:check_{name}") for name in names}
