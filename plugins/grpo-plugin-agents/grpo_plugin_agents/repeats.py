"""Detects retries of requests, so that a retry does not sample again.  Pure.

A request repeats an earlier one of its session if

* both have the same ``Idempotency-Key`` (and the same body: it is an error otherwise), or
* both have the same body, and the client says that it tries again (``x-stainless-retry-count`` above 0, as
  the clients of OpenAI and Anthropic do), or
* both have the same body, the client says nothing about retries, and the client of the earlier one closed
  its connection before the reply.

Any other request with the same body wants another sample.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from attrs import define, field, frozen

T = TypeVar("T")


class KeyReused(Exception):  # noqa: N818 - named after the fault
    """Raised for a request that reuses the ``Idempotency-Key`` of a request with another body."""


@frozen(kw_only=True)
class Attempt:
    """The properties that distinguish a retry from a new request."""

    body: bytes
    """Digest of the path and the body."""
    key: str = ""
    """Value of ``Idempotency-Key``."""
    retries: int | None = None
    """Value of ``x-stainless-retry-count``; None if the client says nothing about retries."""
    gone: Callable[[], bool] = lambda: False
    """Whether its client has closed the connection."""


@define(eq=False)
class Call(Generic[T]):
    """A request, and the attempts to get its answer."""

    answer: T
    waiting: list[Attempt]
    """Attempts without an answer so far."""
    body: bytes
    """Digest of the path and the body."""
    delivered: bool = field(init=False, default=False)
    """Whether an attempt got its answer."""
    retried: int = field(init=False, default=0)
    """Number of attempts that repeated it."""

    @property
    def abandoned(self) -> bool:
        """Whether no attempt received the answer or still waits for it."""
        return not self.delivered and all(attempt.gone() for attempt in self.waiting)


@define(eq=False)
class Repeats(Generic[T]):
    """The requests of a session."""

    _by_key: dict[str, Call[T]] = field(init=False, factory=dict)
    _by_body: dict[bytes, list[Call[T]]] = field(init=False, factory=dict)

    def repeated(self, attempt: Attempt) -> Call[T] | None:
        """Return the request that an attempt repeats, and add the attempt to it; None for a new request.

        Raises KeyReused for the key of an earlier request with another body.
        """
        call = self._find(attempt)
        if call is not None:
            call.waiting.append(attempt)
            call.retried += 1
        return call

    def _find(self, attempt: Attempt) -> Call[T] | None:
        if attempt.key:
            keyed = self._by_key.get(attempt.key)
            if keyed is not None and keyed.body != attempt.body:
                raise KeyReused
            return keyed
        calls = self._by_body.get(attempt.body, ())
        for call in calls:
            if call.abandoned and attempt.retries != 0:
                return call
        if attempt.retries and calls:  # the answer was sent, but did not arrive
            return min(calls, key=lambda call: call.retried)
        return None

    def begin(self, attempt: Attempt, answer: T) -> Call[T]:
        """Record a new request with its answer."""
        call = Call(answer, [attempt], attempt.body)
        if attempt.key:
            self._by_key[attempt.key] = call
        self._by_body.setdefault(attempt.body, []).append(call)
        return call

    def forget(self, call: Call[T]) -> None:
        """Forget a failed request, so that a retry counts as a new one."""
        for key in [key for key, each in self._by_key.items() if each is call]:
            del self._by_key[key]
        for calls in self._by_body.values():
            if call in calls:
                calls.remove(call)

    def delivered(self, call: Call[T], attempt: Attempt) -> None:
        """Record that an attempt received its answer."""
        call.delivered = True
        call.waiting.remove(attempt)
