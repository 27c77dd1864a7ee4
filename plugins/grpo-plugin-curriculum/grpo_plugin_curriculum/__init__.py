"""Samplers that go where the model learns most."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_samplers() -> dict[str, str]:
    return {"learnable": "grpo_plugin_curriculum.learnable:Learnable"}
