"""The languages of agents: OpenAI's chat completions and responses, and Anthropic's messages.  Pure.

A dialect reads a request's body into a ``ChatRequest``, whose messages are those of a chat template, and
writes what was sampled as its own reply: as JSON, or as the events of a stream.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from attrs import frozen

from grpo_core.agents.recorder import parsed
from grpo_core.records import EndReason, Message
from grpo_core.unicode import well_formed

CREATED = 0
"""Time of every reply, in seconds: the same request has the same reply."""

_SAMPLING = frozenset({"temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
                       "repetition_penalty", "seed", "logit_bias", "reasoning_effort"})  # fmt: skip
"""Fields that would change what is sampled; the run's own sampling holds."""


_SURROGATES = (b"\\u", b"\xed", b"\0")
"""Bytes without which JSON has no lone surrogates: an escape, the beginning of one in UTF-8, or UTF-16."""


class BadRequest(Exception):  # noqa: N818 - it is what it is
    """Raised for a request that cannot be answered; its text says why."""


@frozen(kw_only=True)
class ChatRequest:
    """A request for completions."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    model: str = ""
    ignored: tuple[str, ...] = ()
    """Fields of sampling that have no effect."""
    wants_usage: bool = False
    """Whether the stream of a chat completion ends with the numbers of tokens."""


@frozen(kw_only=True)
class Answer:
    """A completion for an agent."""

    id: str
    message: Message
    finish_reason: EndReason
    prompt_tokens: int
    completion_tokens: int

    @property
    def content(self) -> str:
        return str(self.message.get("content") or "")

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        return self.message.get("tool_calls") or ()

    @property
    def truncated(self) -> bool:
        return self.finish_reason in ("length", "tokens")


History = Callable[[str], tuple[Message, ...] | None]
"""Returns the conversation that ends with the reply of an id, or None if there is no such reply."""


class Dialect(Protocol):
    """A language of agents."""

    def read(self, body: Mapping[str, Any], history: History) -> ChatRequest:
        """Read a request.  Raises BadRequest."""
        ...

    def reply(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]: ...
    def stream(self, request: ChatRequest, answers: Sequence[Answer]) -> Iterator[tuple[str, Any]]:
        """Yield the name, which may be empty, and the data of each event."""
        ...

    def error(self, status: int, message: str, code: str) -> dict[str, Any]: ...
    def failure(self, status: int, message: str, code: str) -> tuple[str, Any]:
        """Return the name and the data of the event that ends a stream without a completion."""
        ...


# ---------------------------------------------------------------------------------- reading


def as_object(body: bytes) -> Mapping[str, Any]:
    """Read a body that is a JSON object.  Raises BadRequest, ValueError, RecursionError."""
    read = json.loads(body)
    if not isinstance(read, dict):
        raise BadRequest("the body is no JSON object")
    if not any(sign in body for sign in _SURROGATES):
        return read
    clean = well_formed(read)
    assert isinstance(clean, dict)
    return clean


def _text(content: Any, where: str) -> str:
    """Join the texts of a message's content."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{where}: content is {_short(content)}; expected text or a list of parts")
    return "".join(_part(part, where) for part in content)


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict):
        for key in ("text", "refusal"):
            if isinstance(part.get(key), str):
                return str(part[key])
    raise BadRequest(f"{where}: {_short(part)} is no text; the model reads text alone")


def _number(body: Mapping[str, Any], *keys: str) -> int | None:
    """Return the first of some fields that is given.  Raises BadRequest unless it is a positive number."""
    for key in keys:
        if (value := body.get(key)) is not None:
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise BadRequest(f"{key} is {_short(value)}; expected a whole number of at least 1")
            return value
    return None


def _texts(value: Any, key: str) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value or []
    if not isinstance(given, list) or not all(isinstance(each, str) and each for each in given):
        raise BadRequest(f"{key} is {_short(value)}; expected texts")
    return tuple(given)


def _list(body: Mapping[str, Any], key: str) -> list[Any]:
    value = body.get(key) or []
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise BadRequest(f"{key} is {_short(value)}; expected a list of objects")
    return value


def _call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    if not isinstance(name, str):
        raise BadRequest(f"the name of a tool call is {_short(name)}; expected text")
    return {
        "type": "function",
        "id": str(id or ""),
        "function": {"name": name, "arguments": parsed("{}" if arguments in (None, "") else arguments)},
    }


def _tool(function: Any, schema: str = "parameters") -> dict[str, Any]:
    """Return a tool as chat templates know it."""
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequest(f"{_short(function)} is no tool that the client runs; expected a function")
    return {
        "type": "function",
        "function": {
            "name": function["name"],
            "description": str(function.get("description") or ""),
            "parameters": function.get(schema) or {"type": "object", "properties": {}},
        },
    }


def _named(messages: Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    """Give each answer of a tool the name of the call that it answers."""
    names: dict[str, str] = {}
    for message in messages:
        for call in message.get("tool_calls") or ():
            names[call["id"]] = call["function"]["name"]
        if message["role"] == "tool" and not message.get("name"):
            message["name"] = names.get(message.get("tool_call_id", ""), "")
    return tuple(messages)


def _ignored(body: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that have no effect.  Raises BadRequest for those that the reply could not obey."""
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
    """Raise BadRequest for a form of the answer that the run cannot give."""
    text = body.get("text")
    formats = {"response_format": body.get("response_format")}
    if isinstance(text, dict):
        formats["text.format"] = text.get("format")
    for key, value in formats.items():
        if _kind(value) not in (None, "text"):
            raise BadRequest(
                f"{key} is {_short(value)}; what is sampled is not constrained to a format: ask for it in a "
                "message, or offer a tool with these parameters"
            )
    included = body.get("include")
    asked = isinstance(included, list) and any("logprobs" in str(each) for each in included)
    if asked or body.get("logprobs") or body.get("top_logprobs"):
        raise BadRequest("logprobs are not sent to agents; the run records them. Leave the field out")


def _kind(choice: Any) -> Any:
    """Return what a field chooses, which says so itself or in its type."""
    return choice.get("type") if isinstance(choice, dict) else choice


def _checked(messages: Sequence[dict[str, Any]]) -> tuple[Message, ...]:
    if not messages:
        raise BadRequest("there are no messages")
    return _named(messages)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# ---------------------------------------------------------------------------------- OpenAI, chat completions


class ChatCompletions:
    """``POST /v1/chat/completions``."""

    def read(self, body: Mapping[str, Any], history: History) -> ChatRequest:
        options = body.get("stream_options")
        tools = [_tool(tool.get("function")) for tool in _list(body, "tools")]
        return ChatRequest(
            messages=_checked([_chat_message(message) for message in _list(body, "messages")]),
            tools=() if body.get("tool_choice") == "none" else tuple(tools),
            n=_number(body, "n") or 1,
            max_tokens=_number(body, "max_completion_tokens", "max_tokens"),
            stop=_texts(body.get("stop"), "stop"),
            stream=bool(body.get("stream")),
            model=str(body.get("model") or ""),
            ignored=_ignored(body),
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
        return {"error": {"message": message, "type": _openai_type(status), "param": None, "code": code}}

    def failure(self, status: int, message: str, code: str) -> tuple[str, Any]:
        return "", self.error(status, message, code)

    def _head(self, kind: str, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{answers[0].id}",
            "object": kind,
            "created": CREATED,
            "model": request.model,
        }


def _chat_message(given: dict[str, Any]) -> dict[str, Any]:
    role = {"developer": "system", "function": "tool"}.get(str(given.get("role")), given.get("role"))
    if role not in ("system", "user", "assistant", "tool"):
        raise BadRequest(f"a message has the role {_short(given.get('role'))}; expected system, user, "
                         "assistant or tool")  # fmt: skip
    message: dict[str, Any] = {"role": role, "content": _text(given.get("content"), f"a message of {role}")}
    if role == "assistant":
        message |= {
            key: given[key] for key in ("reasoning_content", "reasoning") if isinstance(given.get(key), str)
        }
        if calls := [_chat_call(call) for call in _list(given, "tool_calls")]:
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
        raise BadRequest(f"{_short(call)} is no call of a function")
    return _call(call.get("id"), function.get("name"), function.get("arguments"))


def _chat_reply(answer: Answer) -> dict[str, Any]:
    said: dict[str, Any] = {"role": "assistant", "content": answer.content}
    for key in ("reasoning_content", "reasoning", "thinking"):
        if thought := answer.message.get(key):
            said["reasoning_content"] = str(thought)
    if answer.calls:
        said["content"] = answer.content or None
        said["tool_calls"] = [
            {"id": call["id"], "type": "function",
             "function": {"name": call["function"]["name"], "arguments": _arguments(call)}}
            for call in answer.calls
        ]  # fmt: skip
    return said


def _arguments(call: Mapping[str, Any]) -> str:
    arguments = call["function"]["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _chat_reason(answer: Answer) -> str:
    return "length" if answer.truncated else "tool_calls" if answer.calls else "stop"


def _chat_usage(answers: Sequence[Answer]) -> dict[str, int]:
    read, written = answers[0].prompt_tokens, sum(answer.completion_tokens for answer in answers)
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


def _openai_type(status: int) -> str:
    if status >= 500:
        return "server_error"
    return {401: "authentication_error", 404: "not_found_error"}.get(status, "invalid_request_error")


# ---------------------------------------------------------------------------------- OpenAI, responses


class Responses:
    """``POST /v1/responses``."""

    def read(self, body: Mapping[str, Any], history: History) -> ChatRequest:
        messages: list[dict[str, Any]] = []
        if before := body.get("previous_response_id"):
            earlier = history(before) if isinstance(before, str) else None
            if earlier is None:
                raise BadRequest(
                    f"previous_response_id is {_short(before)}, which is no reply of this rollout"
                )
            messages += [dict(message) for message in earlier if message["role"] != "system"]
        if instructions := body.get("instructions"):
            messages.insert(0, {"role": "system", "content": _text(instructions, "instructions")})
        given = body.get("input")
        items = [{"role": "user", "content": given}] if isinstance(given, str) else _list(body, "input")
        for item in items:
            _add_item(messages, item)
        tools = [_tool(tool) for tool in _list(body, "tools")]
        return ChatRequest(
            messages=_checked(messages),
            tools=() if body.get("tool_choice") == "none" else tuple(tools),
            max_tokens=_number(body, "max_output_tokens"),
            stream=bool(body.get("stream")),
            model=str(body.get("model") or ""),
            ignored=_ignored(body),
        )

    def reply(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]:
        (answer,) = answers
        cut = {"reason": "max_output_tokens"} if answer.truncated else None
        read, written = answer.prompt_tokens, answer.completion_tokens
        return {
            **self._head(request, answer),
            "status": "incomplete" if cut else "completed",
            "incomplete_details": cut,
            "output": _items(answer),
            "usage": {
                "input_tokens": read,
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": written,
                "output_tokens_details": {"reasoning_tokens": 0},
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
        for place, item in enumerate(whole["output"]):
            events += _item_events(place, item)
        last = "response.incomplete" if answer.truncated else "response.completed"
        events.append({"type": last, "response": whole})
        for number, event in enumerate(events):
            yield event["type"], {**event, "sequence_number": number}

    def error(self, status: int, message: str, code: str) -> dict[str, Any]:
        return {"error": {"message": message, "type": _openai_type(status), "param": None, "code": code}}

    def failure(self, status: int, message: str, code: str) -> tuple[str, Any]:
        """Return an ``error`` event as it is documented, with the error that OpenAI's clients raise."""
        told = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
        return "error", {**told, **self.error(status, message, code)}

    def _head(self, request: ChatRequest, answer: Answer) -> dict[str, Any]:
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
        }


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    """Add an item of ``input``; the calls of one reply are one message."""
    kind = item.get("type", "message")
    if kind == "message":
        message = _chat_message(item)
        if message["role"] == "tool":
            raise BadRequest("an item has the role tool; expected function_call_output")
        messages.append(message)
    elif kind == "function_call":
        call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1] = {**messages[-1], "tool_calls": [*(messages[-1].get("tool_calls") or ()), call]}
    elif kind == "function_call_output":
        content = _text(item.get("output"), "a function_call_output")
        messages.append({"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": content})
    elif kind != "reasoning":  # a reply's own tokens have it
        raise BadRequest(f"an item has the type {_short(kind)}; expected message, function_call, "
                         "function_call_output or reasoning")  # fmt: skip


def _items(answer: Answer) -> list[dict[str, Any]]:
    """Return the output of a reply; its text comes first."""
    status = "incomplete" if answer.truncated else "completed"
    items: list[dict[str, Any]] = []
    if answer.content or not answer.calls:
        text = {"type": "output_text", "text": answer.content, "annotations": [], "logprobs": []}
        items.append({"id": f"msg_{answer.id}", "type": "message", "role": "assistant", "status": status,
                      "content": [text]})  # fmt: skip
    items += [
        {
            "id": f"fc_{answer.id}_{call['id']}",
            "type": "function_call",
            "status": status,
            "call_id": call["id"],
            "name": call["function"]["name"],
            "arguments": _arguments(call),
        }
        for call in answer.calls
    ]
    return items


def _item_events(place: int, item: dict[str, Any]) -> Iterator[dict[str, Any]]:
    at = {"output_index": place, "item_id": item["id"]}
    empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
    begun = {**item, **empty, "status": "in_progress"}
    yield {"type": "response.output_item.added", "output_index": place, "item": begun}
    if item["type"] == "message":
        (part,) = item["content"]
        at |= {"content_index": 0}
        yield {"type": "response.content_part.added", **at, "part": {**part, "text": ""}}
        if part["text"]:
            yield {"type": "response.output_text.delta", **at, "delta": part["text"], "logprobs": []}
        yield {"type": "response.output_text.done", **at, "text": part["text"], "logprobs": []}
        yield {"type": "response.content_part.done", **at, "part": part}
    else:
        kind = "response.function_call_arguments"
        yield {"type": f"{kind}.delta", **at, "delta": item["arguments"]}
        yield {"type": f"{kind}.done", **at, "name": item["name"], "arguments": item["arguments"]}
    yield {"type": "response.output_item.done", "output_index": place, "item": item}


# ---------------------------------------------------------------------------------- Anthropic, messages


class AnthropicMessages:
    """``POST /v1/messages``."""

    def read(self, body: Mapping[str, Any], history: History) -> ChatRequest:
        messages: list[dict[str, Any]] = []
        if system := body.get("system"):
            messages.append({"role": "system", "content": _text(system, "system")})
        for given in _list(body, "messages"):
            messages += _anthropic_messages(given)
        choice = body.get("tool_choice")
        hidden = isinstance(choice, dict) and choice.get("type") == "none"
        tools = [_tool(tool, "input_schema") for tool in _list(body, "tools")]
        return ChatRequest(
            messages=_checked(messages),
            tools=() if hidden else tuple(tools),
            max_tokens=_number(body, "max_tokens"),
            stop=_texts(body.get("stop_sequences"), "stop_sequences"),
            stream=bool(body.get("stream")),
            model=str(body.get("model") or ""),
            ignored=_ignored(body),
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
        for place, block in enumerate(_blocks(answer)):
            events += _block_events(place, block)
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
    """Return the messages that one of Anthropic's stands for: the results of tools are messages."""
    role, content = given.get("role"), given.get("content")
    if role not in ("user", "assistant", "system"):
        raise BadRequest(f"a message has the role {_short(role)}; expected user or assistant")
    if not isinstance(content, list):
        return [{"role": role, "content": _text(content, f"a message of {role}")}]
    if not all(isinstance(block, dict) for block in content):
        raise BadRequest(f"a message of {role} has a block that is no object")
    results = [_result(block) for block in content if block.get("type") == "tool_result"]
    calls = [
        _call(block.get("id"), block.get("name"), block.get("input"))
        for block in content
        if block.get("type") == "tool_use"
    ]
    thoughts = ("thinking", "redacted_thinking")
    rest = [block for block in content if block.get("type") not in ("tool_result", "tool_use", *thoughts)]
    message: dict[str, Any] = {"role": role, "content": _text(rest, f"a message of {role}")}
    if calls:
        message["tool_calls"] = calls
    return [*results, *([message] if rest or calls or not results else [])]


def _result(block: dict[str, Any]) -> dict[str, Any]:
    content = _text(block.get("content"), "a tool_result")
    return {"role": "tool", "tool_call_id": str(block.get("tool_use_id") or ""), "content": content}


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


def _block_events(place: int, block: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if block["type"] == "text":
        empty: dict[str, Any] = {"text": ""}
        delta = {"type": "text_delta", "text": block["text"]}
    else:
        empty = {"input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"], ensure_ascii=False)}
    yield {"type": "content_block_start", "index": place, "content_block": {**block, **empty}}
    yield {"type": "content_block_delta", "index": place, "delta": delta}
    yield {"type": "content_block_stop", "index": place}


def _anthropic_reason(answer: Answer) -> str:
    return "max_tokens" if answer.truncated else "tool_use" if answer.calls else "end_turn"


# ---------------------------------------------------------------------------------- the wire


def encoded(dialect: Dialect, request: ChatRequest, answers: Sequence[Answer]) -> bytes:
    """Return the bytes of a reply: JSON, or the events of a stream."""
    if not request.stream:
        return json.dumps(dialect.reply(request, answers), ensure_ascii=False).encode()
    return b"".join(event(name, data) for name, data in dialect.stream(request, answers))


def event(name: str, data: Any) -> bytes:
    """Return the bytes of an event, whose name may be empty."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n").encode()


CHAT, RESPONSES, ANTHROPIC = ChatCompletions(), Responses(), AnthropicMessages()
DIALECTS: Mapping[str, Dialect] = {
    "/v1/chat/completions": CHAT,
    "/v1/responses": RESPONSES,
    "/v1/messages": ANTHROPIC,
}
"""Dialects by path."""
