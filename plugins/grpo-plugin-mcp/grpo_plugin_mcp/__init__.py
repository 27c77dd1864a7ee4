"""Tools of MCP servers for any environment: ``mcp:COMMAND``."""

import grpo_core as grpo


@grpo.hookimpl
def grpo_environments() -> dict[str, str]:
    return {"*": "grpo_plugin_mcp.environment:ToolsOfServer"}
