"""The dialect of Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_plugin_agents.dialects import reading
from grpo_plugin_agents.dialects.requests import Answer, BadRequest, ChatRequest, History


class AnthropicMessages:
    """``POST /v1/messages``."""

    def read(self, body: Mapping[str, Any], history: History) -> ChatRequest:
        messages: list[dict[str, Any]] = []
        if system := body.get("system"):
            messages.append({"role": "system", "content": system})
        for given in reading.objects(body, "messages"):
            messages += _anthropic_messages(given)
        choice = body.get("tool_choice")
        hidden = isinstance(choice, dict) and choice.get("type") == "none"
        tools = [reading.tool(tool, "input_schema") for tool in reading.objects(body, "tools")]
        return ChatRequest(
            messages=reading.checked(messages),
            tools=() if hidden else tuple(tools),
            max_tokens=reading.number(body, "max_tokens"),
            stop=reading.texts(body.get("stop_sequences"), "stop_sequences"),
            stream=bool(body.get("stream")),
            model=str(body.get("model") or ""),
            ignored=reading.ignored_fields(body),
        )

    def reply(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        return {
            **self._head(request, answer),
            "content": _blocks(answer),
            "stop_reason": _anthropic_reason(answer),
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
        }

    def stream(self, request: ChatRequest, answers: Sequence[Answer]) -> Iterator[tuple[str, Any]]:
        (answer,) = answers
        begun = {
            **self._head(request, answer),
            "content": [],
            "stop_reason": None,
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": 0},
        }
        events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
        for index, block in enumerate(_blocks(answer)):
            events += _block_events(index, block)
        end = {"stop_reason": _anthropic_reason(answer), "stop_sequence": None}
        usage = {"output_tokens": answer.completion_tokens}
        events += [{"type": "message_delta", "delta": end, "usage": usage}, {"type": "message_stop"}]
        for event in events:
            yield event["type"], event

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
        kind = "api_error" if status >= 500 else kinds.get(status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": message}}

    def failure(self, status: int, message: str, code: str) -> tuple[str, Any]:
        return "error", self.error(status, message, code)

    def _head(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "stop_sequence": None,
        }


def _anthropic_messages(given: dict[str, Any]) -> Iterable[dict[str, Any]]:
    """Convert a message of Anthropic's API; each tool result becomes a message."""
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"a message has the role {reading.short(role)}; expected user or assistant")
    if not isinstance(content, list):
        return [{"role": role, "content": content}]
    if not all(isinstance(block, dict) for block in content):
        raise BadRequest(f"a message of {role} has a block that is not an object")
    results = [
        {"role": "tool", "content": block.get("content"), "tool_call_id": block.get("tool_use_id")}
        for block in content
        if block.get("type") == "tool_result"
    ]
    calls = [
        reading.call(block.get("id"), block.get("name"), block.get("input"))
        for block in content
        if block.get("type") == "tool_use"
    ]
    thoughts = ("thinking", "redacted_thinking")
    rest = [block for block in content if block.get("type") not in ("tool_result", "tool_use", *thoughts)]
    message: dict[str, Any] = {"role": role, "content": rest}
    if calls:
        message["tool_calls"] = calls
    return [*results, *([message] if rest or calls or not results else [])]


def _blocks(answer: Answer) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    if answer.content or not answer.calls:
        blocks.append({"type": "text", "text": answer.content})
    for call in answer.calls:
        arguments = call["function"]["arguments"]
        given = arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}
        )
    return blocks


def _block_events(index: int, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if block["type"] == "text":
        empty: dict[str, Any] = {"text": ""}
        delta = {"type": "text_delta", "text": block["text"]}
    else:
        empty = {"input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
    yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
    yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def _anthropic_reason(answer: Answer) -> str:
    return "max_tokens" if answer.truncated else "tool_use" if answer.calls else "end_turn"
