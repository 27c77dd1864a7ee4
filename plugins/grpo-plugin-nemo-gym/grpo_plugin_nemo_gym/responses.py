"""Conversion between messages and the items of OpenAI's Responses API, which NeMo Gym uses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpo_core as grpo


def messages_of(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Convert ``responses_create_params`` to messages.  Raises ConfigError for parts other than text."""
    given = params.get("input")
    items = [{"role": "user", "content": given}] if isinstance(given, str) else given
    if not isinstance(items, list) or not all(isinstance(item, Mapping) for item in items) or not items:
        raise grpo.ConfigError(
            f"nemo_gym: responses_create_params.input is {given!r:.80}; expected text or messages"
        )
    messages: list[dict[str, Any]] = []
    if params.get("instructions"):
        messages.append({"role": "system", "content": str(params["instructions"])})
    for item in items:
        kind = item.get("type") or "message"
        if kind == "message":
            messages.append({"role": str(item.get("role")), "content": _text(item.get("content"))})
        elif kind == "function_call":  # all calls of a reply are in one message
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            calls = messages[-1].setdefault("tool_calls", [])
            calls.append({"id": item.get("call_id", ""), "type": "function", "function": function})
        elif kind == "function_call_output":
            call_id, text = item.get("call_id", ""), _text(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": call_id, "content": text})
        elif kind != "reasoning":  # reasoning of earlier turns is not part of a prompt
            raise grpo.ConfigError(
                f"nemo_gym: the prompt has an item of the type {kind!r}, which is not a text"
            )
    return messages


def items_of(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert the messages of a prompt to items."""
    return [item for number, message in enumerate(messages) for item in _items(message, str(number), "")]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    given = [part.get("text") for part in parts if isinstance(part, Mapping)]
    texts = [text for text in given if isinstance(text, str)]
    if not texts or len(texts) < len(parts):
        raise grpo.ConfigError(f"nemo_gym: the prompt has the content {content!r:.100}; expected text")
    return "\n".join(texts)


def tools_of(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the function tools that a row declares."""
    tools = [tool for tool in params.get("tools") or () if isinstance(tool, Mapping)]
    return [dict(tool) for tool in tools if tool.get("type", "function") == "function" and tool.get("name")]


def response_of(
    said: Sequence[Mapping[str, Any]], params: Mapping[str, Any], *, id: str, truncated: bool, thought: str
) -> dict[str, Any]:
    """Convert the messages after the prompt to a response.

    Args:
        said: messages after the prompt.
        params: the row's ``responses_create_params``.
        id: id of the response.
        truncated: whether a token limit cut the last completion off.
        thought: text that ends reasoning, which becomes a separate item; empty for none.
    """
    output = [
        item for number, message in enumerate(said) for item in _items(message, f"{id}_{number}", thought)
    ]
    return {
        "id": id,
        "created_at": 0.0,
        "model": "policy",
        "object": "response",
        "output": output,
        "parallel_tool_calls": bool(params.get("parallel_tool_calls", True)),
        "tool_choice": params.get("tool_choice") or "auto",
        "tools": list(params.get("tools") or ()),
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
    }


def _items(message: Mapping[str, Any], id: str, thought: str) -> Iterator[dict[str, Any]]:
    text = str(message.get("content") or "")
    if message["role"] == "tool":
        call_id = message.get("tool_call_id") or ""
        yield {"type": "function_call_output", "call_id": call_id, "output": text}
        return
    if message["role"] != "assistant":
        yield {"type": "message", "role": message["role"], "content": text}
        return
    reasoning = str(message.get("reasoning_content") or "")
    if thought and thought in text:
        reasoning, _, text = text.rpartition(thought)
    if reasoning:
        summary = [{"type": "summary_text", "text": reasoning.removeprefix("<think>").strip()}]
        yield {"type": "reasoning", "id": f"rs_{id}", "summary": summary}
        text = text.lstrip("\n")
    calls = message.get("tool_calls") or ()
    if text or not calls:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        yield {
            "type": "message", "role": "assistant", "id": f"msg_{id}", "content": content,
            "status": "completed",
        }  # fmt: skip
    for call in calls:
        function = call["function"]
        arguments = function["arguments"]
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        yield {
            "type": "function_call", "name": function["name"], "arguments": arguments, "status": "completed",
            "call_id": call.get("id") or "", "id": f"fc_{id}",
        }  # fmt: skip
