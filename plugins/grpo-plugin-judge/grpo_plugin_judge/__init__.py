"""Language models that judge replies by a rubric: ``judge:openai``."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, grpo.Offer]:
    requires = {"openai": "pip install openai"}
    return {"openai": grpo.Offer("grpo_plugin_judge.environment:Judge", requires=requires)}
