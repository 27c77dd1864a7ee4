"""Samplers that prefer tasks from which the model learns most."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_samplers() -> dict[str, str]:
    return {"learnable": "grpo_plugin_curriculum.learnable:Learnable"}
