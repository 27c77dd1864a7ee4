"""The procedural tasks of reasoning-gym as environments: ``reasoning_gym:chain_sum`` and a hundred more."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, str]:
    return {"*": "grpo_plugin_reasoning_gym.environment:ReasoningGym"}
