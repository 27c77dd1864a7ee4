"""The dialect of OpenAI's Responses API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_plugin_agents.dialects import reading
from grpo_plugin_agents.dialects.chat_completions import CREATED, Errors, arguments, message_of
from grpo_plugin_agents.dialects.requests import Answer, BadRequest, ChatRequest, History

_READ = ("input", "instructions", "max_output_tokens", "previous_response_id", "text")
"""Fields that only this dialect has."""


class Responses(Errors):
    """``POST /v1/responses``."""

    def read(self, body: Mapping[str, Any], history: History) -> ChatRequest:
        messages: list[dict[str, Any]] = []
        if before := body.get("previous_response_id"):
            earlier = history(before) if isinstance(before, str) else None
            if earlier is None:
                raise BadRequest(
                    f"previous_response_id is {reading.short(before)}, which is not a reply of this rollout"
                )
            messages += [dict(message) for message in earlier if message["role"] != "system"]
        if instructions := body.get("instructions"):
            messages.insert(0, {"role": "system", "content": instructions})
        given = body.get("input")
        items = (
            [{"role": "user", "content": given}] if isinstance(given, str) else reading.objects(body, "input")
        )
        for item in items:
            _add_item(messages, item)
        tools = [reading.tool(tool, "function", tool) for tool in reading.objects(body, "tools")]
        return ChatRequest(
            messages=reading.checked(messages),
            tools=() if reading.kind(body.get("tool_choice")) == "none" else tuple(tools),
            max_tokens=reading.number(body, "max_output_tokens"),
            stream=bool(body.get("stream")),
            model=str(body.get("model") or ""),
            ignored=reading.ignored_fields(body, _READ),
        )

    def reply(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        cut = {"reason": "max_output_tokens"} if answer.truncated else None
        read, written = answer.prompt_tokens, answer.completion_tokens
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": CREATED,
            "model": request.model,
            "error": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": None,
            "tool_choice": "auto",
            "tools": [],
            "top_p": None,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": cut,
            "output": _items(answer),
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": answer.thought_tokens},
                "total_tokens": read + written,
            },
        }

    def stream(self, request: ChatRequest, answers: Sequence[Answer]) -> Iterator[tuple[str, Any]]:
        (answer,) = answers
        whole = self.reply(request, answers)
        begun = {**whole, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
        events: list[dict[str, Any]] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(whole["output"]):
            events += _item_events(index, item)
        last = "response.incomplete" if answer.truncated else "response.completed"
        events.append({"type": last, "response": whole})
        for number, event in enumerate(events):
            yield event["type"], {**event, "sequence_number": number}

    def failure(self, status: int, message: str, code: str) -> tuple[str, Any]:
        """Return the documented ``error`` event, with the error that OpenAI's clients raise."""
        event = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
        return "error", {**event, **self.error(status, message, code)}


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Append an item of ``input``; all calls of a reply are in one message."""
    kind = item.get("type", "message")
    if kind == "message":
        if item.get("role") in ("tool", "function"):
            raise BadRequest("an item has the role tool; expected function_call_output")
        messages.append(message_of(item))
    elif kind == "function_call":
        call = reading.call(item.get("call_id"), item.get("name"), item.get("arguments"))
        if not messages or messages[-1].get("role") != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1] = {**messages[-1], "tool_calls": [*(messages[-1].get("tool_calls") or ()), call]}
    elif kind == "function_call_output":
        answer = {"role": "tool", "content": item.get("output"), "tool_call_id": item.get("call_id")}
        messages.append(answer)
    elif kind != "reasoning":  # reasoning is recorded with the tokens of its reply
        raise BadRequest(f"an item has the type {reading.short(kind)}; expected message, function_call, "
                         "function_call_output or reasoning")  # fmt: skip


def _items(answer: Answer) -> list[dict[str, Any]]:
    """Return the output items of a reply: its thinking, its text, its calls."""
    status = "incomplete" if answer.truncated else "completed"
    thought, content = answer.parts
    items: list[dict[str, Any]] = []
    if thought:
        parts = [{"type": "reasoning_text", "text": thought}]
        items.append({"id": f"rs_{answer.id}", "type": "reasoning", "summary": [], "content": parts})
    if content or not answer.calls:
        text = {"type": "output_text", "text": content, "annotations": [], "logprobs": []}
        items.append({"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": status,
                      "content": [text]})  # fmt: skip
    items += [
        {
            "id": f"fc_{answer.id}_{call['id']}",
            "type": "function_call",
            "status": status,
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": arguments(call),
        }
        for call in answer.calls
    ]
    return items


def _item_events(index: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    at = {"output_index": index, "item_id": item["id"]}
    empty: dict[str, Any] = {"arguments": ""} if item["type"] == "function_call" else {"content": []}
    begun = {**item, **empty, "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": index, "item": begun}
    if item["type"] == "message":
        (part,) = item["content"]
        at |= {"content_index": 0}
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
        if part["text"]:
            yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **at, "part": part}
    elif item["type"] == "reasoning":
        (part,), kind = item["content"], "response.reasoning_text"
        yield {"type": f"{kind}.delta", **at, "content_index": 0, "delta": part["text"]}
        yield {"type": f"{kind}.done", **at, "content_index": 0, "text": part["text"]}
    else:
        kind = "response.function_call_arguments"
        yield {"type": f"{kind}.delta", **at, "delta": item["arguments"]}
        yield {"type": f"{kind}.done", **at, "name": item["name"], "arguments": item["arguments"]}
    yield {"type": "response.output_item.done", "output_index": index, "item": item}
