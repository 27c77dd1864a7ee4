"""The player ``agents`` serves the model to clients of OpenAI and Anthropic, and records what it samples."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core import hookimpl


@hookimpl
def grpo_players() -> Mapping[str, str]:
    return {"agents": "grpo_plugin_agents.server:AgentServer"}
