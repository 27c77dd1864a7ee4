"""Unavailable services: how to recognise them, when to retry, and for how long.

A service is away from a call that fails until a call is answered; without an answer for ``budget`` seconds
the run ends.
"""

from __future__ import annotations

import errno
import random
import socket
from collections.abc import Callable
from urllib.parse import urlsplit

from attrs import define, field

from grpo_core.contracts.errors import Unavailable, describe
from grpo_core.processes.services import BUSY, retry_after

FIRST_BUDGET = 30.0
"""Seconds without an answer that end the run if a service has never answered."""
JITTER = random.Random()
"""Random numbers for the jitter of pauses only."""
SHORTEST, LONGEST = 1.0, 30.0
"""Seconds of the first and the longest pause, unless the service requests more."""

# ---------------------------------------------------------------------------------- errors

_LIBRARIES = frozenset(
    {"aiohttp", "anthropic", "http", "httpcore", "httpx", "httpx2", "openai", "requests", "urllib", "urllib3"}
    | {"botocore", "groq", "redis", "websockets"}
)
_LATE = frozenset(
    {"APITimeoutError", "PoolTimeout", "ReadTimeout", "ReadTimeoutError", "ServerTimeoutError"}
    | {"Timeout", "TimeoutError", "TimeoutException", "WriteTimeout"}
)
_GONE = frozenset(
    {"APIConnectionError", "ChunkedEncodingError", "ClientConnectionError", "ClientPayloadError"}
    | {"ConnectTimeout", "ConnectTimeoutError", "ConnectionClosed", "ConnectionClosedError"}
    | {"ConnectionError", "ConnectionTimeoutError", "IncompleteRead", "MaxRetryError", "NetworkError"}
    | {"NewConnectionError", "ProtocolError", "RemoteProtocolError", "URLError"}
)
_UNREACHABLE = frozenset({errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH})
_STATUS = frozenset({"APIStatusError", "ClientResponseError", "HTTPError", "HTTPStatusError"})


def unavailable(error: BaseException) -> Unavailable | None:
    """Return an error as Unavailable if it means that, or None.

    Errors of clients that may not be installed are matched by name.
    """
    if isinstance(error, Unavailable):
        return error
    if isinstance(error, BaseExceptionGroup):
        found = [unavailable(each) for each in error.exceptions]
        return found[0] if all(found) else None
    kinds = [kind.__name__ for kind in type(error).__mro__ if kind.__module__.split(".")[0] in _LIBRARIES]
    status = _status(error) if _STATUS.intersection(kinds) else None
    gone = next((kind for kind in kinds if kind in _GONE or kind in _LATE), "")
    late = gone in _LATE or isinstance(error, TimeoutError)
    if status is not None and status not in BUSY:
        return None
    if status is not None or late or gone or _unconnected(error):
        away = Unavailable(_said(error), retry_after=_retry_after(error))
        away.timed_out = late and gone not in _GONE
        return away
    return None if error.__cause__ is None else unavailable(error.__cause__)


def _unconnected(error: BaseException) -> bool:
    if isinstance(error, (ConnectionError, socket.gaierror)):
        return True
    # asyncio joins the errors of the addresses of a host in one OSError without a number
    return isinstance(error, OSError) and (error.errno in _UNREACHABLE or "Connect call failed" in str(error))


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    found = (
        getattr(each, name, None) for each in (error, response) for name in ("status_code", "status", "code")
    )
    return next((status for status in found if isinstance(status, int)), None)


def _retry_after(error: BaseException) -> float | None:
    headers = getattr(getattr(error, "response", None), "headers", None) or getattr(error, "headers", None)
    return None if headers is None else retry_after(headers)


def _said(error: BaseException) -> str:
    """Format an error, with the address if its message lacks it."""
    text = describe(error)
    try:
        url = urlsplit(str(error.request.url))  # type: ignore[attr-defined]
        address = f"{url.scheme}://{url.hostname}{f':{url.port}' if url.port else ''}{url.path}"
    except Exception:  # httpx raises RuntimeError for an error without a request
        return text
    return text if address in text else f"{text} ({address})"


# ---------------------------------------------------------------------------------- the rules


@define(eq=False)
class Outage:
    """The rules for one service.  Pure: it reads no clock.

    Args:
        budget: seconds without an answer that end the run.
        jitter: returns a number from 0 to 1 that lengthens pauses.
    """

    budget: float
    jitter: Callable[[], float]
    since: float | None = field(init=False, default=None)
    """Time of the first failure while the service is away."""
    due: float = field(init=False, default=0.0)
    """Time of the next retry."""
    failures: int = field(init=False, default=0)
    """Number of failures since then."""
    over: bool = field(init=False, default=False)
    """Whether the budget is used up."""
    answers: int = field(init=False, default=0)
    """Number of its answers."""
    _pause: float = field(init=False, default=0.0)

    @property
    def until(self) -> float:
        """Time at which the budget is used up."""
        return (self.since or 0.0) + (self.budget if self.answers else min(self.budget, FIRST_BUDGET))

    def answered(self, began: float) -> None:
        """Record an answer to a call: the service is here, unless it went away after the call ``began``."""
        self.answers += 1
        if self.since is None or began >= self.since:
            self.since, self.failures, self._pause, self.over = None, 0, 0.0, False

    def failed(self, now: float, retry_after: float | None = None) -> bool:
        """Record a failure; return whether it lengthens the pause: of many at once only one does."""
        if self.since is None:
            self.since = now
        self.over = now >= self.until
        longer = now >= self.due or not self._pause
        if longer:
            self.failures += 1
            self._pause = min(2 * self._pause, LONGEST) or SHORTEST
            self.due = now + self._pause * (1 + self.jitter() / 2)
        self.due = min(max(self.due, now + (retry_after or 0.0)), self.until)
        return longer
