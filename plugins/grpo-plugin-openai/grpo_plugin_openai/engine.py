"""The engine ``openai``: one chat completion for each turn."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rich.console import Console

from grpo_core import (
    ConfigError,
    EngineError,
    EngineSetup,
    GenerationRequest,
    Message,
    PluginError,
    Reply,
    TextEngine,
    Unavailable,
)
from grpo_core.kit import Service, normalised, services
from grpo_plugin_openai.progress import Progress
from grpo_plugin_openai.replies import Replies, digest

SENT = ("role", "content", "tool_calls", "tool_call_id", "name")
"""Keys of a message that the API accepts."""
THOUGHTS = ("reasoning_content", "reasoning")
"""Keys under which servers return the reasoning of a model."""
WHOLE = ("stop", "eos", "eos_token", "end_turn", "stop_sequence", "complete", "tool_calls", "")
"""Finish reasons of whole replies, in lower case; some servers send none."""
CUT_OFF = ("length", "max_tokens", "model_length")
"""Finish reasons of replies that a limit cut off."""
STOPPED_BY = ("stop_reason", "matched_stop")
"""Keys under which vLLM and SGLang name the stop string that ended a reply; its text lacks the string."""
BUSY = frozenset({408, 409, 425, 429, *range(500, 600)})
"""Statuses after which a request is sent again."""
OPENAI = "https://api.openai.com/v1"
LOCAL = ("http://127.0.0.1", "http://localhost", "http://[::1]")
"""Prefixes of the addresses of servers on this machine, which need no key."""


def check(*, model: str = "", key: str = "OPENAI_API_KEY", base_url: str = "", **_: Any) -> None:
    """Raise ConfigError if the model or its key is missing."""
    if not model:
        raise ConfigError('engine.options.model is missing; name the hosted model, as in "gpt-5-mini"')
    if not base_url.startswith(LOCAL) and not os.environ.get(key):
        raise ConfigError(
            f"the environment variable {key} is not set; it holds the key of the service "
            "(engine.options.key names the variable)"
        )


class OpenAIEngine(TextEngine):
    """A ``TextEngine`` that calls a server with OpenAI's chat API.

    Args:
        model: name of the model, as the server knows it.
        base_url: address of the server, as "http://127.0.0.1:8000/v1"; empty: OpenAI's own.
        key: name of the environment variable with the key.
        concurrency: largest number of concurrent requests.
        unavailable_for: longest tolerated outage in seconds.  After 408, 409, 429, 5xx and lost connections
            all requests wait, for the time that the server requests or with exponential backoff, while one of
            them retries; after this time without an answer the measurement ends.
        timeout: seconds for one request.
        leave_out: fields that the server does not accept, such as "temperature" or "seed".
        extra: further fields of each request, such as ``{reasoning_effort = "low"}``.
        replies: directory for the replies of an interrupted measurement, which the next one with the same
            model reuses.  Empty stores none.
    """

    def __init__(
        self,
        setup: EngineSetup,
        *,
        model: str = "",
        base_url: str = "",
        key: str = "OPENAI_API_KEY",
        concurrency: int = 32,
        unavailable_for: float = 900.0,
        timeout: float = 600.0,
        leave_out: Sequence[str] = (),
        extra: Mapping[str, Any] | None = None,
        replies: str = "runs/openai",
    ) -> None:
        self._client = services.Client(
            base_url or OPENAI, who="engine openai", key=os.environ.get(key, ""), seconds=timeout, busy=BUSY
        )
        self._service = Service(model, unavailable_for, key="engine.options.unavailable_for")
        self._model, self._leave_out, self._extra = model, frozenset(leave_out), dict(extra or {})
        self._slots = asyncio.Semaphore(concurrency)
        self._url = f"{self._client.url}/chat/completions"
        name = blake2b(f"{self._url} {model}".encode(), digest_size=6).hexdigest()
        self._replies = Replies(Path(replies) / f"{name}.jsonl" if replies else None)
        self._progress = Progress(Console(stderr=True), model, again=len(self._replies))

    async def chat(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], request: GenerationRequest
    ) -> Reply:
        body = self._request(messages, tools, request)
        if (known := self._replies.get(body)) is not None:
            return known
        self._progress.requested()
        try:
            async with self._slots:
                reply, prompt_tokens, retries = await self._answer(body, request.stop)
        except BaseException:
            self._replies.miss(body)
            raise
        self._progress.answered(prompt_tokens, reply.completion_tokens, retries)
        self._replies.keep(body, reply)
        return reply

    async def aclose(self) -> None:
        self._progress.end(self._replies.close())
        await self._client.aclose()

    def _request(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], request: GenerationRequest
    ) -> dict[str, Any]:
        """Return the body of a request."""
        body: dict[str, Any] = {
            "model": self._model,
            "messages": [_sent(message) for message in messages],
            "max_completion_tokens": request.max_tokens,
            "temperature": request.temperature,
            "seed": request.seed,
        }
        if request.top_p < 1:
            body["top_p"] = request.top_p
        if request.top_k:
            body["top_k"] = request.top_k
        if request.min_p:
            body["min_p"] = request.min_p
        if request.stop:
            body["stop"] = list(request.stop)
        if tools:
            body["tools"] = list(tools)
        kept = {name: value for name, value in body.items() if name not in self._leave_out}
        return kept | self._extra

    async def _answer(self, body: Mapping[str, Any], stops: Sequence[str]) -> tuple[Reply, int, int]:
        """Request a completion; return the reply, the number of its prompt's tokens, and of retries."""
        retries = -1

        async def once() -> Any:
            nonlocal retries
            retries += 1
            return await self._once(body)

        found = await self._service.call(digest(body), once)
        return *_read(found, self._url, stops), retries

    async def _once(self, body: Mapping[str, Any]) -> Any:
        """Send a request once; return the answer."""
        try:
            answer = await self._client.post("/chat/completions", body)
            if answer.status != 200:
                raise answer.refused(_remedy(answer.status))
            return answer.json(dict)
        except Unavailable as error:  # if it is the last one, the service is available to others
            raise EngineError(str(error)) from error
        except services.ServiceError as error:
            # an answer that cannot be read costs one reply; whatever else it is, all others would be it, too
            raise (EngineError if error.status == 200 else PluginError)(str(error)) from error


def _sent(message: Message) -> dict[str, Any]:
    """Convert a message for the API: arguments of calls become JSON text."""
    sent = {name: message[name] for name in SENT if name in message}
    if calls := message.get("tool_calls"):
        sent["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": _as_text(call["function"]["arguments"])}}
            for call in calls
        ]
    return sent


def _as_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _read(answer: Mapping[str, Any], url: str, stops: Sequence[str]) -> tuple[Reply, int]:
    """Return the reply in an answer, and the number of its prompt's tokens.

    A stop string that ended it is a part of its text, as it is with an engine that gives tokens.
    Raises EngineError if there is none, as after a filter or a refusal: such a reply is unscored.
    """
    try:
        (choice, *_) = answer["choices"]
        given, usage = choice["message"], answer.get("usage") or {}
        reason = str(choice.get("finish_reason") or "").lower()
        calls = given.get("tool_calls")
        thought = next((given[name] for name in THOUGHTS if given.get(name)), None)
        empty = given.get("content") is None and not calls and not thought
        if refusal := given.get("refusal"):
            raise EngineError(f"{url}: the model refused: {services.said(str(refusal))}")
        if reason not in CUT_OFF and (reason not in WHOLE or empty):
            raise EngineError(f"{url}: the reply is withheld (finish_reason {services.said(repr(reason))})")
        message: dict[str, Any] = {"role": "assistant", "content": given.get("content") or ""}
        if thought:
            message["reasoning_content"] = str(thought)
        if calls:
            message["tool_calls"] = [{"type": "function", "function": call["function"]} for call in calls]
        (message,) = normalised([message], sampled=True)
        stopped = next((choice[key] for key in STOPPED_BY if choice.get(key) in stops), "")
        if given.get("content") is not None:
            message["content"] = message["content"].removesuffix(stopped) + stopped
        reply = Reply(
            message=message,
            finish_reason="length" if reason in CUT_OFF else "stop",
            completion_tokens=max(0, int(usage.get("completion_tokens") or 0)),
        )
        return reply, max(0, int(usage.get("prompt_tokens") or 0))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise EngineError(
            f"{url} did not answer with a chat completion: {services.said(json.dumps(answer))} "
            f"({type(error).__name__}: {services.said(str(error))})"
        ) from None


def _remedy(status: int) -> str:
    if status in (401, 403):
        return "; check the key (engine.options.key names its environment variable)"
    if status == 404:
        return "; check engine.options.model and engine.options.base_url"
    return "; engine.options.leave_out leaves out fields that the server does not accept"
