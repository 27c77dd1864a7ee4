"""Samplers that go where the model learns most."""

import grpo_core as grpo
from grpo_plugin_curriculum.learnable import Learnable

__all__ = ["Learnable", "grpo_samplers"]


@grpo.hookimpl
def grpo_samplers() -> dict[str, type[Learnable]]:
    return {"learnable": Learnable}
