"""The player ``agents`` serves the model to clients of OpenAI and Anthropic, and records what it samples.

The environments ``agent:COMMAND`` are agents that are programs.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core import Offer, hookimpl


@hookimpl
def grpo_environments() -> Mapping[str, str]:
    return {"agent:*": "grpo_plugin_agents.program:AgentProgram"}


@hookimpl
def grpo_players() -> Mapping[str, Offer]:
    return {"agents": Offer("grpo_plugin_agents.server:AgentServer", role="plays_agents")}
