"""An HTTP client for one judge, with retries, rate limit and cache."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from attrs import field, frozen

import grpo_core as grpo
from grpo_core.kit import read_body, unavailable, well_formed
from grpo_plugin_judge.cache import Cache, key_of

KEYS = ("model", "url", "key_variable", "parameters", "name")


@frozen(kw_only=True)
class JudgeModel:
    """A judge model and its address.

    Attributes:
        url: base address of an API like OpenAI's, such as ``http://127.0.0.1:8000/v1``.
        key_variable: environment variable with the key; if it is unset, no key is sent.
        parameters: further fields of each request, such as ``temperature``.
    """

    model: str
    url: str
    key_variable: str = "OPENAI_API_KEY"
    parameters: Mapping[str, Any] = field(factory=dict)
    name: str = ""

    @classmethod
    def of(cls, given: Mapping[str, Any], default: Mapping[str, Any]) -> JudgeModel:
        """Return the model of a table; missing keys take the defaults.  Raises ConfigError."""
        if unknown := sorted(set(given) - set(KEYS)):
            near = grpo.did_you_mean(unknown[0], set(KEYS))
            raise grpo.ConfigError(
                f"judge: a judge has no key {unknown[0]!r}.{near} Its keys: {', '.join(KEYS)}"
            )
        values = {**default, **given}
        for name in ("model", "url"):
            if not isinstance(values.get(name), str) or not values[name]:
                raise grpo.ConfigError(f"judge: {name} is {values.get(name)!r}; expected a text")
        return cls(**values)


class Pace:
    """Limits the number of requests that start in a minute; 0 is unlimited."""

    def __init__(self, requests_per_minute: float) -> None:
        self._interval = 60.0 / requests_per_minute if requests_per_minute else 0.0
        self._next = 0.0

    async def wait(self) -> None:
        now = asyncio.get_running_loop().time()
        begin = max(now, self._next)
        self._next = begin + self._interval
        if begin > now:
            await asyncio.sleep(begin - now)


LARGEST = 4 << 20
"""Largest size of an answer in bytes; 100,000 tokens take half a million."""


class NoScore(Exception):  # noqa: N818 - named after the outcome
    """Raised if a judge did not answer after all retries, or its answer has no score."""


class Asker:
    """The client of one judge.

    Only the ``openai`` package retries: timeouts, lost connections, and the statuses 408, 409, 429 and 500 to
    599, with exponential backoff or the delay that the server requests.

    Args:
        judge: the model and its address.
        cache: cache of answers with a score.
        pace: rate limit of requests, including retries.
        timeout: seconds for each attempt.
        retries: number of attempts after the first.
    """

    def __init__(self, judge: JudgeModel, *, cache: Cache, pace: Pace, timeout: float, retries: int) -> None:
        self.judge = judge
        self._cache, self._pace, self._timeout, self._retries = cache, pace, timeout, retries
        self._client: Any = None

    async def score(
        self, messages: Sequence[Mapping[str, str]], vote: int, read: Callable[[str], float | None]
    ) -> tuple[float, bool]:
        """Return a score, and whether the answer came from the cache.  Raises NoScore."""
        judge = self.judge
        question: dict[str, Any] = {"messages": list(messages), "model": judge.model, **judge.parameters}
        if vote:  # otherwise a server may return the same answer
            question.setdefault("seed", vote)
        key = key_of(url=judge.url, vote=vote, whole=True, **question)
        text = self._cache.get(key)
        if text is not None and (known := await self._read(text, read)) is not None:
            return known, True
        text = await self._completed(question)
        if (score := await self._read(text, read)) is None:
            raise NoScore(f"{judge.model} gave no score: {text[-200:]!r}")
        self._cache.put(key, text)
        return score, False

    async def _read(self, text: str, read: Callable[[str], float | None]) -> float | None:
        try:
            return await asyncio.to_thread(read, text)
        except TimeoutError as error:
            raise NoScore(f"{self.judge.model}: {error}") from None

    async def aclose(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def _completed(self, question: Mapping[str, Any]) -> str:
        import openai

        if self._client is None:
            self._client = openai.AsyncOpenAI(
                base_url=self.judge.url,
                api_key=os.environ.get(self.judge.key_variable) or "none",
                timeout=self._timeout,
                max_retries=self._retries,
                http_client=_http_client(self._pace, self._timeout),
            )
        try:
            found = await self._client.chat.completions.create(**question)
            text = whole(found.choices[0])
        except Exception as error:  # the client raises various errors for malformed answers
            reason = f"{type(error).__name__}: {error.__cause__ or error}"
            raise NoScore(f"{self.judge.model} did not answer: {reason:.1000}") from error
        return str(well_formed(text))


WHOLE = ("stop", "eos", "eos_token", "end_turn", "stop_sequence", "complete", "")
"""Reasons for which an answer has ended by itself; servers that name none are believed."""


def whole(choice: Any) -> str:
    """Return the text of an answer that has ended by itself.

    Raises ValueError for one that a limit or a filter cut off: what is left has no verdict.
    """
    text, reason = choice.message.content, choice.finish_reason
    if str(reason or "").lower() not in WHOLE:
        more = "; parameters.max_tokens is its limit" if reason == "length" else ""
        raise ValueError(f"its answer is not whole, finish_reason is {reason!r}{more}")
    if refusal := getattr(choice.message, "refusal", None):
        raise ValueError(f"it refuses: {refusal!r:.200}")
    if not isinstance(text, str):
        raise ValueError(f"expected a text, got {text!r:.80}")
    return text


def away_by(error: BaseException) -> grpo.Unavailable | None:
    """Describe an error as an outage of the judge; too long an answer is not an outage."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ValueError):
            return None
        cause = cause.__cause__
    return unavailable(error)


def _http_client(pace: Pace, timeout: float) -> Any:
    """Return a client with rate limit, without redirects, and with limits of size and time of an answer.

    A redirect could lead to another machine.  The ``openai`` package retries on top of this client, so each
    attempt counts against the rate limit.
    """
    import openai

    kind: Any = openai.DefaultAsyncHttpxClient
    http: Any = import_module(kind.__mro__[1].__module__.partition(".")[0])  # httpx or httpx2

    class Bounded(kind):  # type: ignore[misc]
        async def send(self, request: Any, **given: Any) -> Any:
            await pace.wait()
            try:
                async with asyncio.timeout(timeout):  # httpx limits each read only
                    return await super().send(request, **given)
            except TimeoutError as error:
                raise http.ReadTimeout(f"no answer within {timeout:g} s") from error

    async def bound(response: Any) -> None:
        try:
            body = await read_body(response.stream, response.headers, LARGEST)
        except ValueError as error:
            raise http.ReadError(str(error)) from error
        response.stream = http.ByteStream(body)

    headers = {"Accept-Encoding": "identity"}
    return Bounded(follow_redirects=False, headers=headers, event_hooks={"response": [bound]})
