"""The HTTP dialects of agents: OpenAI's chat completions and responses, and Anthropic's messages.  Pure.

A dialect parses a request's body into a ``ChatRequest`` with messages for a chat template, and encodes
completions as its reply: as JSON, or as the events of a stream.
"""

from __future__ import annotations

from collections.abc import Mapping

from grpo_plugin_agents.dialects.anthropic import AnthropicMessages
from grpo_plugin_agents.dialects.chat_completions import ChatCompletions
from grpo_plugin_agents.dialects.requests import Answer, BadRequest, ChatRequest, Dialect, encoded, event
from grpo_plugin_agents.dialects.responses import Responses

__all__ = [
    "ANTHROPIC",
    "CHAT",
    "DIALECTS",
    "Answer",
    "BadRequest",
    "ChatRequest",
    "Dialect",
    "encoded",
    "event",
]

CHAT, ANTHROPIC = ChatCompletions(), AnthropicMessages()
DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": Responses(),
    "/v1/messages": ANTHROPIC,
}
"""Dialects by path."""
