"""Servers of OpenEnv: ``openenv:http://127.0.0.1:8000``."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, str]:
    return {"*": "grpo_plugin_openenv.environment:OpenEnv"}
