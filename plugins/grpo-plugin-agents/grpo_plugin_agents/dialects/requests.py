"""Requests and answers independent of a dialect, and the interface of dialects."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from attrs import frozen

from grpo_core import EndReason, Message
from grpo_core.text import thoughts


class BadRequest(Exception):  # noqa: N818 - named after HTTP's status
    """Raised for a request that cannot be answered; the text is the reason."""


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
    """Whether the stream of a chat completion ends with the token usage."""
    wants_thinking: bool = False
    """Whether a client of Anthropic's messages reads blocks of thinking."""


@frozen(kw_only=True)
class Answer:
    """A completion for an agent."""

    id: str
    message: Message
    finish_reason: EndReason
    prompt_tokens: int
    completion_tokens: int
    thought_tokens: int = 0
    """Number of tokens up to the end of the thinking."""
    stop: str | None = None
    """The stop sequence of the request that ended the completion, if one did."""
    thinking: bool = False
    """Whether the prompt opens a thinking block that the completion does not close."""

    @property
    def content(self) -> str:
        return str(self.message.get("content") or "")

    @property
    def parts(self) -> tuple[str, str]:
        """The thinking (may be empty), and the content without it."""
        return thoughts.parted(self.message, thinking=self.thinking)

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]:
        return self.message.get("tool_calls") or ()

    @property
    def truncated(self) -> bool:
        return self.finish_reason in ("length", "tokens")


History = Callable[[str], tuple[Message, ...] | None]
"""A function that returns the conversation up to the reply with this id, or None if the id is unknown."""


class Dialect(Protocol):
    """An HTTP dialect of agents."""

    def read(self, body: Mapping[str, Any], history: History) -> ChatRequest:
        """Parse the body of a request.  Raises BadRequest."""
        ...

    def reply(self, request: ChatRequest, answers: Sequence[Answer]) -> dict[str, Any]: ...
    def stream(self, request: ChatRequest, answers: Sequence[Answer]) -> Iterator[tuple[str, Any]]:
        """Yield the name (may be empty) and the data of each event."""
        ...

    def error(self, status: int, message: str, code: str) -> dict[str, Any]: ...
    def failure(self, status: int, message: str, code: str) -> tuple[str, Any]:
        """Return the name and the data of the event that ends a stream without a completion."""
        ...


def encoded(dialect: Dialect, request: ChatRequest, answers: Sequence[Answer]) -> bytes:
    """Encode a reply: as JSON, or as the events of a stream."""
    if not request.stream:
        return json.dumps(dialect.reply(request, answers), ensure_ascii=False).encode()
    return b"".join(event(name, data) for name, data in dialect.stream(request, answers))


def event(name: str, data: Any) -> bytes:
    """Encode a server-sent event; the name may be empty."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n").encode()
