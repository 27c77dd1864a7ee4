"""Samplers that change the mixture of tasks or prompts during a run."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_samplers() -> dict[str, str]:
    return {
        "chosen": "grpo_plugin_curriculum.curriculum:TaskOrder",
        "schedule": "grpo_plugin_curriculum.curriculum:Schedule",
        "curriculum": "grpo_plugin_curriculum.curriculum:Curriculum",
        "learnable": "grpo_plugin_curriculum.curriculum:Learnable",
        "learnable_prompts": "grpo_plugin_curriculum.learnable_prompts:LearnablePrompts",
    }
