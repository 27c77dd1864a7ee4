"""A request and its answers in no language of any agent, and what a dialect does with them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from attrs import frozen

from grpo_core import EndReason, Message
from grpo_core.kit import thoughts


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
    thinking: bool = False
    """Whether the prompt has begun the model's thinking, which did not end."""

    @property
    def content(self) -> str:
        return str(self.message.get("content") or "")

    @property
    def parts(self) -> tuple[str, str]:
        """The thinking, which may be empty, and the content without it."""
        return thoughts.parted(self.message, thinking=self.thinking)

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


def encoded(dialect: Dialect, request: ChatRequest, answers: Sequence[Answer]) -> bytes:
    """Return the bytes of a reply: JSON, or the events of a stream."""
    if not request.stream:
        return json.dumps(dialect.reply(request, answers), ensure_ascii=False).encode()
    return b"".join(event(name, data) for name, data in dialect.stream(request, answers))


def event(name: str, data: Any) -> bytes:
    """Return the bytes of an event, whose name may be empty."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
    return (f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n").encode()
