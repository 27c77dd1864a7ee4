"""OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_core.agents.dialects import openai, reading
from grpo_core.agents.dialects.requests import Answer, BadRequest, ChatRequest, History


class ChatCompletions:
    """``POST /v1/chat/completions``."""

    def read(self, body: Mapping[str, Any], history: History) -> ChatRequest:
        options = body.get("stream_options")
        tools = [reading.tool(tool.get("function")) for tool in reading.objects(body, "tools")]
        messages = [chat_message(message) for message in reading.objects(body, "messages")]
        return ChatRequest(
            messages=reading.checked(messages),
            tools=() if body.get("tool_choice") == "none" else tuple(tools),
            n=reading.number(body, "n") or 1,
            max_tokens=reading.number(body, "max_completion_tokens", "max_tokens"),
            stop=reading.texts(body.get("stop"), "stop"),
            stream=bool(body.get("stream")),
            model=str(body.get("model") or ""),
            ignored=reading.ignored_fields(body),
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
            said = _chat_reply(answer)
            for place, call in enumerate(said.get("tool_calls", ())):
                call["index"] = place
            for delta, reason in ((said, None), ({}, _chat_reason(answer))):
                choice = {"index": i, "delta": delta, "finish_reason": reason, "logprobs": None}
                yield "", {**head, "choices": [choice]}
        if request.wants_usage:
            yield "", {**head, "choices": [], "usage": _chat_usage(answers)}
        yield "", "[DONE]"

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": openai.error_type(status), "param": None, "code": code}}

    def failure(self, status: int, message: str, code: str) -> tuple[str, Any]:
        return "", self.error(status, message, code)

    def _head(self, kind: str, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{answers[0].id}",
            "object": kind,
            "created": openai.CREATED,
            "model": request.model,
        }


def chat_message(given: dict[str, Any]) -> dict[str, Any]:
    role = {"developer": "system", "function": "tool"}.get(str(given.get("role")), given.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"a message has the role {reading.short(given.get('role'))}; expected system, user, "
                         "assistant or tool")  # fmt: skip
    message: dict[str, Any] = {
        "role": role,
        "content": reading.text(given.get("content"), f"a message of {role}"),
    }
    if role == "assistant":
        message |= {
            key: given[key] for key in ("reasoning_content", "reasoning") if isinstance(given.get(key), str)
        }
        if calls := [_chat_call(call) for call in reading.objects(given, "tool_calls")]:
            message["tool_calls"] = calls
    if role == "tool":
        message |= {
            "tool_call_id": str(given.get("tool_call_id") or ""),
            "name": str(given.get("name") or ""),
        }
    return message


def _chat_call(call: dict[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, dict):
        raise BadRequest(f"{reading.short(call)} is no call of a function")
    return reading.call(call.get("id"), function.get("name"), function.get("arguments"))


def _chat_reply(answer: Answer) -> dict[str, Any]:
    thought, content = answer.parts
    said: dict[str, Any] = {"role": "assistant", "content": content}
    if thought:
        said["reasoning_content"] = thought
    if answer.calls:
        said["content"] = content or None
        said["tool_calls"] = [
            {"id": call["id"], "type": "function",
             "function": {"name": call["function"]["name"], "arguments": openai.arguments(call)}}
            for call in answer.calls
        ]  # fmt: skip
    return said


def _chat_reason(answer: Answer) -> str:
    return "length" if answer.truncated else "tool_calls" if answer.calls else "stop"


def _chat_usage(answers: Sequence[Answer]) -> dict[str, int]:
    read, written = answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
