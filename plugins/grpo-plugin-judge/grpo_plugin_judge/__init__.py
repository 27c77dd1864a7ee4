"""Language models that judge replies by a rubric: ``judge:openai``."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, str]:
    return {"openai": "grpo_plugin_judge.environment:Judge"}
