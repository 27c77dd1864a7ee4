"""Further losses and advantages, as plugins of grpo-core."""

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
