"""Engines that return only text: a hosted model plays like any other, but its replies cannot be trained."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from attrs import evolve

from grpo_core.contracts.errors import EngineError, shown
from grpo_core.contracts.protocols import Engine, TextEngine
from grpo_core.contracts.records import Completion, GenerationRequest, Message, Reply, Rollout, Weights
from grpo_core.contracts.tokens import Ids
from grpo_core.text.messages import MessageError, normalised

T = TypeVar("T")
Conversation = tuple[tuple[Message, ...], tuple[Mapping[str, Any], ...]]
"""Messages, and the JSON schemas of the tools that the model may call."""

NUMBERS = 4
"""Number of token ids that stand for a conversation: 124 bits of its digest."""


class TextRenderer:
    """A ``Renderer`` whose token ids stand for whole conversations and replies.

    The rollout code handles tokens; a hosted model handles messages.  The ids of a prompt are a digest of its
    conversation; the first id of a completion is the number of its reply, and their number is the service's
    token count.  ``without_tokens`` removes them at the end.
    """

    stop_token_ids: tuple[int, ...] = ()
    context = vocabulary = tokens = 2**31
    """The service enforces its own limits."""

    def __init__(self) -> None:
        self._conversations: dict[tuple[int, ...], Conversation] = {}
        self._replies: dict[int, Message] = {}
        self._numbers = itertools.count()

    async def run(self, work: Callable[[], T], size: int) -> T:
        return work()

    def check_turns(self, *, tools: bool) -> None:
        return None

    def prompt_ids(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[int, ...]:
        digest = blake2b(
            json.dumps([messages, tools], default=str).encode(), digest_size=4 * NUMBERS
        ).digest()
        ids = tuple((np.frombuffer(digest, dtype="<u4") >> 1).tolist())
        self._conversations[ids] = tuple(messages), tuple(tools)
        return ids

    def continuation_ids(self, messages: Sequence[Message], **_: Any) -> None:
        """Return None: each request to the service contains the whole conversation."""

    def message(self, text: str, *, token_ids: Ids, **_: Any) -> Message:
        return self._replies[int(token_ids[0])]

    def texts(self, rows: Sequence[Sequence[int]], before: Sequence[Sequence[int]] = ()) -> list[str]:
        """Return the contents of replies; the ids of a prompt have no text."""
        return [str(self._replies.get(row[0], {}).get("content") or "") for row in rows]

    def conversation(self, ids: Ids) -> Conversation:
        """Return the messages and the tools behind the ids of a prompt."""
        return self._conversations[tuple(ids.tolist())]

    def completion(self, reply: Reply, request: GenerationRequest) -> Completion:
        """Return the completion for a reply.  Raises EngineError for a malformed one."""
        try:
            (message,) = normalised([reply.message], sampled=True)
        except MessageError as error:
            raise EngineError(f"engine: chat() returned a reply that cannot be read: {error}") from None
        if message["role"] != "assistant":
            raise EngineError(
                f"engine: chat() returned a message of the role {shown(message['role'])}; expected assistant"
            )
        number = next(self._numbers)
        self._replies[number] = message
        n = min(max(1, reply.completion_tokens), request.max_tokens)
        return Completion(
            token_ids=[number, *[0] * (n - 1)],
            logprobs=np.zeros(n),
            versions=np.zeros(n, dtype=np.int64),
            finish_reason=reply.finish_reason,
        )


class PlayingText(Engine):
    """An ``Engine`` around one that returns text.

    Args:
        renderer: the renderer of its session, whose token ids it reads.
    """

    def __init__(self, engine: TextEngine, renderer: TextRenderer) -> None:
        self._engine, self._renderer = engine, renderer

    async def generate(self, requests: Sequence[GenerationRequest]) -> list[Completion]:
        asked = [self._completion(request) for request in requests]
        found = await asyncio.gather(*asked, return_exceptions=True)  # an error loses no other replies
        for result in found:
            if isinstance(result, BaseException):
                raise result
        return [result for result in found if isinstance(result, Completion)]

    async def _completion(self, request: GenerationRequest) -> Completion:
        messages, tools = self._renderer.conversation(request.prompt_ids)
        return self._renderer.completion(await self._engine.chat(messages, tools, request), request)

    async def update_weights(self, weights: Weights) -> None:
        return None

    async def aclose(self) -> None:
        await self._engine.aclose()


def without_tokens(rollout: Rollout) -> Rollout:
    """Return a rollout of a text engine without the ids that stand for texts."""
    return evolve(rollout, segments=())
