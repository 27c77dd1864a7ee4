"""The dialect of Anthropic's Messages API."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_plugin_agents.dialects import reading
from grpo_plugin_agents.dialects.requests import Answer, BadRequest, ChatRequest, History

_READ = ("max_tokens", "messages", "stop_sequences", "system")
"""Fields that only this dialect has."""


class AnthropicMessages:
    """``POST /v1/messages``."""

    def read(self, body: Mapping[str, Any], history: History) -> ChatRequest:
        messages: list[dict[str, Any]] = []
        if system := body.get("system"):
            messages.append({"role": "system", "content": system})
        for given in reading.objects(body, "messages"):
            messages += _anthropic_messages(given)
        if messages and messages[-1]["role"] == "assistant":
            raise BadRequest("the last message is the assistant's; its beginning cannot be continued here")
        tools = [
            reading.tool(tool, "custom", tool, "input_schema") for tool in reading.objects(body, "tools")
        ]
        return ChatRequest(
            messages=reading.checked(messages),
            tools=() if reading.kind(body.get("tool_choice")) == "none" else tuple(tools),
            max_tokens=reading.number(body, "max_tokens"),
            stop=reading.texts(body.get("stop_sequences"), "stop_sequences"),
            stream=bool(body.get("stream")),
            model=str(body.get("model") or ""),
            ignored=reading.ignored_fields(body, _READ),
            wants_thinking=reading.kind(body.get("thinking")) not in (None, "disabled"),
        )

    def reply(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        return {
            **self._head(request, answer),
            "content": _blocks(request, answer),
            **_end(answer),
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
        }

    def stream(self, request: ChatRequest, answers: Sequence[Answer]) -> Iterator[tuple[str, Any]]:
        (answer,) = answers
        begun = {
            **self._head(request, answer),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": 0},
        }
        events: list[dict[str, Any]] = [{"type": "message_start", "message": begun}]
        for index, block in enumerate(_blocks(request, answer)):
            events += _block_events(index, block)
        usage = {"output_tokens": answer.completion_tokens}
        events += [{"type": "message_delta", "delta": _end(answer), "usage": usage}, {"type": "message_stop"}]
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
    others = ("tool_result", "tool_use", "thinking", "redacted_thinking")
    rest = [block for block in content if block.get("type") not in others]
    message: dict[str, Any] = {"role": role, "content": rest}
    if thinking := "".join(str(block.get("thinking") or "") for block in content):
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return [*results, *([message] if rest or calls or not results else [])]


def _blocks(request: ChatRequest, answer: Answer) -> list[dict[str, Any]]:
    """Return the blocks of a reply; thinking is left out for a client that did not request it."""
    thought, content = answer.parts
    blocks: list[dict[str, Any]] = []
    if thought and request.wants_thinking:
        blocks.append({"type": "thinking", "thinking": thought, "signature": ""})
    if content or not (blocks or answer.calls):
        blocks.append({"type": "text", "text": content})
    for call in answer.calls:
        arguments = call["function"]["arguments"]
        given = arguments if isinstance(arguments, Mapping) else {"arguments": arguments}
        blocks.append(
            {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": given}
        )
    return blocks


def _block_events(index: int, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    kind = block["type"]
    if kind == "tool_use":
        empty: dict[str, Any] = {"input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
    else:
        empty = {kind: ""}
        delta = {"type": f"{kind}_delta", kind: block[kind]}
    yield {"type": "content_block_start", "index": index, "content_block": {**block, **empty}}
    yield {"type": "content_block_delta", "index": index, "delta": delta}
    yield {"type": "content_block_stop", "index": index}


def _end(answer: Answer) -> dict[str, Any]:
    """Return why a reply ended; complete calls are to be run, whatever ended the text after them."""
    if answer.truncated:
        return {"stop_reason": "max_tokens", "stop_sequence": None}
    if answer.calls or answer.stop is None:
        return {"stop_reason": "tool_use" if answer.calls else "end_turn", "stop_sequence": None}
    return {"stop_reason": "stop_sequence", "stop_sequence": answer.stop}
