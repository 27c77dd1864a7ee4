"""The single-player games of TextArena as environments: ``textarena:GuessTheNumber-v0`` and many more."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, str]:
    return {"*": "grpo_plugin_textarena.environment:TextArena"}
