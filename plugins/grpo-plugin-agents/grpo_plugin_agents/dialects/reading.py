"""Parsing and checks that the requests of all dialects share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_core import Message, errors
from grpo_core.kit import normalised
from grpo_plugin_agents.dialects.requests import BadRequest

_READ = ("model", "stream", "tools", "tool_choice", "parallel_tool_calls", "logprobs", "top_logprobs",
         "response_format", "thinking")  # fmt: skip
"""Fields that each dialect reads."""
_SILENT = ("metadata", "user", "user_profile_id", "safety_identifier", "store", "service_tier", "include",
           "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control",
           "stream_options", "truncation", "inference_geo", "moderation", "diagnostics")  # fmt: skip
"""Fields that change no completion."""
_REFUSED = ("functions", "function_call", "audio", "web_search_options", "background", "conversation",
            "prompt", "container", "mcp_servers", "context_management", "structured_outputs",
            "structural_tag", "continue_final_message", "echo", "prompt_logprobs")  # fmt: skip
"""Fields without which the reply is not what the client expects."""
_UNSET: tuple[Any, ...] = (None, [], {}, "auto", "default", "disabled", ["text"])
"""Values with which a field asks for nothing."""


def number(body: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first field that is present, or None.  Raises BadRequest unless it is a positive integer."""
    for key in keys:
        if (value := body.get(key)) is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadRequest(f"{key} is {short(value)}; expected a whole number of at least 1")
            return value
    return None


def texts(value: Any, key: str) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value or []
    if not isinstance(given, list) or not all(isinstance(each, str) and each for each in given):
        raise BadRequest(f"{key} is {short(value)}; expected texts")
    return tuple(given)


def objects(body: Mapping[str, Any], key: str) -> list[Any]:
    value = body.get(key) or []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise BadRequest(f"{key} is {short(value)}; expected a list of objects")
    return value


def call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": id, "function": {"name": name, "arguments": arguments}}


def tool(given: Mapping[str, Any], type: str, function: Any, schema: str = "parameters") -> dict[str, Any]:
    """Convert a tool to the form of chat templates; one of another type is run, or known, by its server."""
    if (
        given.get("type", type) != type
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise BadRequest(f"{short(given)} is not a tool that the client runs; expected a function")
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": str(function.get("description") or ""),
            "parameters": function.get(schema) or {"type": "object", "properties": {}},
        },
    }


def ignored_fields(body: Mapping[str, Any], read: Sequence[str]) -> tuple[str, ...]:
    """Return the fields that have no effect.  Raises BadRequest for fields that the reply would violate.

    Args:
        read: fields that the dialect reads in addition to those of all dialects.
    """
    _refuse(body)
    names = {key for key, value in body.items() if value not in _UNSET} - {*_READ, *_SILENT, *read}
    choice = body.get("tool_choice")
    if kind(choice) not in (None, "auto", "none"):
        names.add("tool_choice")
    if isinstance(choice, dict) and choice.get("disable_parallel_tool_use"):
        names.add("tool_choice.disable_parallel_tool_use")
    if body.get("parallel_tool_calls") is False:
        names.add("parallel_tool_calls")
    reasoning, thinking = body.get("reasoning"), body.get("thinking")
    if isinstance(reasoning, dict) and not any(value is not None for value in reasoning.values()):
        names.discard("reasoning")
    if isinstance(thinking, dict) and thinking.get("budget_tokens"):
        names.add("thinking.budget_tokens")
    return tuple(sorted(names))


def _refuse(body: Mapping[str, Any]) -> None:
    """Raise BadRequest for what the run does not offer, such as logprobs or a response format."""
    if wanted := [key for key in _REFUSED if body.get(key)]:
        raise BadRequest(f"{wanted[0]} is {short(body[wanted[0]])}, which is not offered here; leave it out")
    formats = {"response_format": body.get("response_format")}
    for key in ("text", "output_config"):
        if isinstance(outer := body.get(key), dict):
            formats[f"{key}.format"] = outer.get("format")
    for key, value in formats.items():
        if kind(value) not in (None, "text"):
            raise BadRequest(
                f"{key} is {short(value)}; what is sampled is not constrained to a format: ask for it in a "
                "message, or offer a tool with these parameters"
            )
    included = body.get("include")
    wants_logprobs = isinstance(included, list) and any("logprobs" in str(each) for each in included)
    if wants_logprobs or body.get("logprobs") or body.get("top_logprobs"):
        raise BadRequest("logprobs are not sent to agents; the run records them. Leave the field out")


def kind(choice: Any) -> Any:
    """Return the choice in a field: its ``type`` if it is an object, else its value."""
    return choice.get("type") if isinstance(choice, dict) else choice


def checked(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Convert messages to the form of chat templates.  Raises BadRequest."""
    if not messages:
        raise BadRequest("there are no messages")
    try:
        return normalised(messages, sampled=True)
    except ValueError as error:
        raise BadRequest(str(error)) from None


def short(value: Any) -> str:
    return errors.shortened(repr(value), 80)
