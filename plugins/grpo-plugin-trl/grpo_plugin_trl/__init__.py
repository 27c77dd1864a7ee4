"""Reward functions and environment classes written for TRL: ``trl:my_rewards:accuracy``."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, str]:
    return {"*": "grpo_plugin_trl.offers:make"}
