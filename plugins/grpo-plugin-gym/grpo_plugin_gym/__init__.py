"""Environments of gymnasium, played in text: ``gym:FrozenLake-v1``, ``gym:module:Class``."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, grpo.Offer]:
    requires = {"gymnasium": "pip install gymnasium"}
    return {"*": grpo.Offer("grpo_plugin_gym.environment:Gym", requires=requires)}
