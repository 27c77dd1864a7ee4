"""Tasksets of verifiers (v1) as environments: ``verifiers:my_taskset``."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, str]:
    return {"*": "grpo_plugin_verifiers.environment:taskset"}
