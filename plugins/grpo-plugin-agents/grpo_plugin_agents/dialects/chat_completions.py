"""The dialect of OpenAI's Chat Completions API, and what its Responses API shares with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_core.text import thoughts
from grpo_plugin_agents.dialects import reading
from grpo_plugin_agents.dialects.requests import Answer, ChatRequest, History

_READ = ("max_completion_tokens", "max_tokens", "messages", "n", "stop", "stream_options")
"""Fields that only this dialect has."""

CREATED = 0
"""Timestamp of every reply, in seconds; constant, so that equal requests have equal replies."""


def arguments(call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


class Errors:
    """The errors of OpenAI's dialects."""

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        kinds = {401: "authentication_error", 404: "not_found_error"}
        kind = "server_error" if status >= 500 else kinds.get(status, "invalid_request_error")
        return {"error": {"message": message, "type": kind, "param": None, "code": code}}

    def failure(self, status: int, message: str, code: str) -> tuple[str, Any]:
        return "", self.error(status, message, code)


class ChatCompletions(Errors):
    """``POST /v1/chat/completions``."""

    def read(self, body: Mapping[str, Any], history: History) -> ChatRequest:
        options = body.get("stream_options")
        tools = [
            reading.tool(tool, "function", tool.get("function")) for tool in reading.objects(body, "tools")
        ]
        messages = [message_of(message) for message in reading.objects(body, "messages")]
        return ChatRequest(
            messages=reading.checked(messages),
            tools=() if reading.kind(body.get("tool_choice")) == "none" else tuple(tools),
            n=reading.number(body, "n") or 1,
            max_tokens=reading.number(body, "max_completion_tokens", "max_tokens"),
            stop=reading.texts(body.get("stop"), "stop"),
            stream=bool(body.get("stream")),
            model=str(body.get("model") or ""),
            ignored=reading.ignored_fields(body, _READ),
            wants_usage=isinstance(options, dict) and bool(options.get("include_usage")),
        )

    def reply(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = [
            {"index": i, "message": _chat_reply(answer), "finish_reason": _chat_reason(answer),
             "logprobs": None}
            for i, answer in enumerate(answers)
        ]  # fmt: skip
        return {
            **self._head("chat.completion", request, answers),
            "choices": choices,
            "usage": _chat_usage(answers),
        }

    def stream(self, request: ChatRequest, answers: Sequence[Answer]) -> Iterator[tuple[str, Any]]:
        head = self._head("chat.completion.chunk", request, answers)
        for i, answer in enumerate(answers):
            message = _chat_reply(answer)
            for index, call in enumerate(message.get("tool_calls", ())):
                call["index"] = index
            for delta, reason in ((message, None), ({}, _chat_reason(answer))):
                choice = {"index": i, "delta": delta, "finish_reason": reason, "logprobs": None}
                yield "", {**head, "choices": [choice]}
        if request.wants_usage:
            yield "", {**head, "choices": [], "usage": _chat_usage(answers)}
        yield "", "[DONE]"

    def _head(self, kind: str, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{answers[0].id}",
            "object": kind,
            "created": CREATED,
            "model": request.model,
        }


_KEPT: Mapping[str, tuple[str, ...]] = {
    "assistant": ("tool_calls", "function_call", "reasoning_content", "reasoning"),
    "tool": ("tool_call_id", "name"),
    "function": ("name",),
}
"""Keys that a model may read in addition to role and content, by role; other keys are dropped."""


def message_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return an OpenAI message without the keys that a model does not read."""
    kept = ("role", "content", *_KEPT.get(str(given.get("role")), ()))
    message = {key: given[key] for key in kept if given.get(key) is not None}
    return {
        key: part
        for key, part in message.items()
        if key not in thoughts.THOUGHT_KEYS or isinstance(part, str)
    }


def _chat_reply(answer: Answer) -> dict[str, Any]:
    thought, content = answer.parts
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        message["reasoning_content"] = thought
    if answer.calls:
        message["content"] = content or None
        message["tool_calls"] = [
            {"id": call["id"], "type": "function",
             "function": {"name": call["function"]["name"], "arguments": arguments(call)}}
            for call in answer.calls
        ]  # fmt: skip
    return message


def _chat_reason(answer: Answer) -> str:
    return "length" if answer.truncated else "tool_calls" if answer.calls else "stop"


def _chat_usage(answers: Sequence[Answer]) -> dict[str, Any]:
    read, written = answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers)
    details = {"reasoning_tokens": sum(answer.thought_tokens for answer in answers)}
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "completion_tokens_details": details,
    }
