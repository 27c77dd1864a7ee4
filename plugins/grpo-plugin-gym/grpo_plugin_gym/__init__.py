"""Environments of gymnasium, played in text: ``gym:FrozenLake-v1``, ``gym:module:Class``."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, str]:
    return {"*": "grpo_plugin_gym.environment:Gym"}
