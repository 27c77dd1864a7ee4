"""Parsing and checks that the requests of all dialects share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_core import Message
from grpo_core.kit import MessageError, normalised
from grpo_plugin_agents.dialects.requests import BadRequest

_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                       "repetition_penalty", "seed", "logit_bias", "reasoning_effort"})  # fmt: skip
"""Sampling parameters of requests, which have no effect: the run's settings apply."""


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


def tool(function: Any, schema: str = "parameters") -> dict[str, Any]:
    """Convert a tool to the form of chat templates."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{short(function)} is not a tool that the client runs; expected a function")
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": str(function.get("description") or ""),
            "parameters": function.get(schema) or {"type": "object", "properties": {}},
        },
    }


def ignored_fields(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that have no effect.  Raises BadRequest for fields that the reply would violate."""
    _refuse(body)
    names = {key for key in _SAMPLING if body.get(key) is not None}
    if _kind(body.get("tool_choice")) not in (None, "auto", "none"):
        names.add("tool_choice")
    if body.get("parallel_tool_calls") is False:
        names.add("parallel_tool_calls")
    if _kind(body.get("thinking")) not in (None, "disabled"):
        names.add("thinking")
    reasoning = body.get("reasoning")
    if isinstance(reasoning, dict) and any(value is not None for value in reasoning.values()):
        names.add("reasoning")
    return tuple(sorted(names))


def _refuse(body: Mapping[str, Any]) -> None:
    """Raise BadRequest for a response format or logprobs, which the run does not offer."""
    text = body.get("text")
    formats = {"response_format": body.get("response_format")}
    if isinstance(text, dict):
        formats["text.format"] = text.get("format")
    for key, value in formats.items():
        if _kind(value) not in (None, "text"):
            raise BadRequest(
                f"{key} is {short(value)}; what is sampled is not constrained to a format: ask for it in a "
                "message, or offer a tool with these parameters"
            )
    included = body.get("include")
    wants_logprobs = isinstance(included, list) and any("logprobs" in str(each) for each in included)
    if wants_logprobs or body.get("logprobs") or body.get("top_logprobs"):
        raise BadRequest("logprobs are not sent to agents; the run records them. Leave the field out")


def _kind(choice: Any) -> Any:
    """Return the choice in a field: its ``type`` if it is an object, else its value."""
    return choice.get("type") if isinstance(choice, dict) else choice


def checked(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """Convert messages to the form of chat templates.  Raises BadRequest."""
    if not messages:
        raise BadRequest("there are no messages")
    try:
        return normalised(messages, sampled=True)
    except MessageError as error:
        raise BadRequest(str(error)) from None


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
