"""An HTTP client for one judge, with retries, rate limit and cache."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from attrs import field, frozen

import grpo_core as grpo
from grpo_core.kit import services

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


WAIT = 30.0
"""Lock timeout in seconds while the file is opened."""
LATER_WAIT = 0.1
"""Later lock timeout in seconds; it blocks all judging, and writing an answer takes less than 0.001 s."""


class Cache:
    """A table of answers in an SQLite file, shared between processes; without a path it stays empty.

    If reading or writing fails because of a lock, a full disk or a damaged file, the judge is called again.

    Raises ConfigError if the file cannot be opened.
    """

    def __init__(self, path: Path | None) -> None:
        self._connection: sqlite3.Connection | None = None
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._connection = sqlite3.connect(path, timeout=WAIT, isolation_level=None)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=OFF")  # answers lost in a crash are requested again
            self._connection.execute("CREATE TABLE IF NOT EXISTS answers (key TEXT PRIMARY KEY, text TEXT)")
            self._connection.execute(f"PRAGMA busy_timeout={int(1000 * LATER_WAIT)}")
        except (OSError, sqlite3.Error) as error:
            raise grpo.ConfigError(f"judge: the cache {str(path)!r} cannot be opened: {error}") from error

    def get(self, key: str) -> str | None:
        if self._connection is None:
            return None
        row = None
        with suppress(sqlite3.Error):
            row = self._connection.execute("SELECT text FROM answers WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def put(self, key: str, text: str) -> None:
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?)", (key, text))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None


def key_of(**question: Any) -> str:
    """Return the key of a question: a digest of everything that the answer depends on."""
    return hashlib.sha256(json.dumps(question, sort_keys=True, default=str).encode()).hexdigest()


BUSY = frozenset({408, 409, 425, 429, *range(500, 600)})
"""Statuses after which a request is sent again."""
LARGEST = 4 << 20
"""Largest size of an answer in bytes; 100,000 tokens take half a million."""


class NoScore(Exception):  # noqa: N818 - named after the outcome
    """Raised if a judge did not answer after all retries, or its answer has no score."""


class Asker:
    """The client of one judge.

    Requests are repeated after timeouts, lost connections, and the statuses of ``BUSY``, with exponential
    backoff or after the delay that the server requests.

    Args:
        judge: the model and its address.
        cache: cache of answers with a score.
        pace: rate limit of requests, including retries.
        timeout: seconds for each attempt.
        retries: number of attempts after the first.
    """

    def __init__(self, judge: JudgeModel, *, cache: Cache, pace: Pace, timeout: float, retries: int) -> None:
        self.judge = judge
        self._cache, self._pace, self._retries = cache, pace, retries
        key = os.environ.get(judge.key_variable, "")
        self._client = services.Client(
            judge.url, who=f"judge {judge.model}", key=key, seconds=timeout, busy=BUSY, largest=LARGEST
        )
        self.aclose = self._client.aclose

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

    async def _completed(self, question: Mapping[str, Any]) -> str:
        async def attempt() -> str:
            await self._pace.wait()
            answer = await self._client.post("/chat/completions", question)
            if answer.status != 200:
                raise answer.refused()
            try:
                return whole(answer.json(dict)["choices"][0])
            except (LookupError, TypeError, AttributeError) as error:
                wrong = f"{type(error).__name__}: {error}"
                raise services.ServiceError(
                    f"{answer.what}: expected a chat completion, got {services.said(answer.text)} ({wrong})"
                ) from None
            except ValueError as error:
                raise services.ServiceError(f"{answer.what}: {error}") from None

        try:
            return await services.retried(attempt, self._retries, grpo.Unavailable)
        except (grpo.Unavailable, services.ServiceError) as error:
            raise NoScore(f"{self.judge.model} did not answer: {error}") from error


WHOLE = ("stop", "eos", "eos_token", "end_turn", "stop_sequence", "complete", "")
"""Reasons for which an answer has ended by itself; servers that name none are believed."""


def whole(choice: Mapping[str, Any]) -> str:
    """Return the text of an answer that has ended by itself.

    Raises ValueError for one that a limit or a filter cut off: what is left has no verdict.
    """
    text, reason = choice["message"]["content"], choice.get("finish_reason")
    if str(reason or "").lower() not in WHOLE:
        more = "; parameters.max_tokens is its limit" if reason == "length" else ""
        raise ValueError(f"its answer is not whole, finish_reason is {services.said(repr(reason))}{more}")
    if refusal := choice["message"].get("refusal"):
        raise ValueError(f"it refuses: {services.said(repr(refusal))}")
    if not isinstance(text, str):
        raise ValueError(f"expected a text, got {services.said(repr(text))}")
    return text


def away_by(error: BaseException) -> grpo.Unavailable | None:
    """Return the outage of the judge that an error reports, or None."""
    return error.__cause__ if isinstance(error.__cause__, grpo.Unavailable) else None
