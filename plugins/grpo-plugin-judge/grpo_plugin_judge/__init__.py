"""Rewards from language models that judge by a rubric, and from combinations of environments."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, grpo.Offer | str]:
    requires = {"openai": "pip install openai"}
    return {
        "compose": "grpo_plugin_judge.compose:Compose",
        "openai": grpo.Offer("grpo_plugin_judge.environment:Judge", requires=requires),
    }
