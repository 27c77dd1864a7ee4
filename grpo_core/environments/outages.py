"""Unavailable services: how to recognise them, when to retry, and for how long.

    here ──a call fails──> away ──a call is answered──> here
                           │
                           └──no answer for ``budget`` seconds──> Unavailable, which ends the run

While a service is away all its calls wait, and one of them retries, with growing pauses.  A call that takes
too long may be the fault of its prompt: the service is away only if a call with another prompt takes too long
as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import errno
import random
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar
from urllib.parse import urlsplit

from attrs import define, field

from grpo_core.contracts.errors import Unavailable, describe
from grpo_core.contracts.incidents import report
from grpo_core.processes.aio import Changes, not_counted

T = TypeVar("T")
R = TypeVar("R")

FIRST_BUDGET = 30.0
"""Seconds without an answer that end the run if a service has never answered."""
JITTER = random.Random()
"""Random numbers for the jitter of pauses only."""
SHORTEST, LONGEST = 1.0, 30.0
"""Seconds of the first and the longest pause, unless the service requests more."""
SLACK = 0.01
"""Seconds by which a clock may be early."""
MOST_LATE, MOST_REFUSED = 2, 3
"""A prompt is at fault after this many calls with it alone took too long, or were refused, if the service
answered others in between."""

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
_BUSY = frozenset({429, 502, 503, 504})
"""HTTP statuses that mean "later", also from a proxy of an unavailable service."""


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
    if status is not None and status not in _BUSY:
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
    """Return the seconds in a Retry-After header, which may be a date."""
    headers = getattr(getattr(error, "response", None), "headers", None) or getattr(error, "headers", None)
    given = "" if headers is None else str(headers.get("Retry-After", ""))
    with contextlib.suppress(ValueError):
        return float(given)
    with contextlib.suppress(ValueError):
        return email.utils.parsedate_to_datetime(given).timestamp() - time.time()
    return None


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
    at_fault: set[str] = field(init=False, factory=set)
    """Prompts that fail while it answers others."""
    alone: Counter[str] = field(init=False, factory=Counter)
    """Failures of calls with one prompt alone, since the prompt's last answer."""
    _first: dict[str, int] = field(init=False, factory=dict)
    """Value of ``answers`` at a prompt's first failure since the prompt's last answer."""
    _late: set[str] = field(init=False, factory=set)
    """Prompts whose calls took too long since the last answer."""
    _newest: tuple[str, int] = field(init=False, default=("", 0))
    """The prompt of the last answer, and its number."""
    _other: tuple[str, int] = field(init=False, default=("", 0))
    """The same for the last answer to another prompt."""
    _pause: float = field(init=False, default=0.0)

    @property
    def until(self) -> float:
        """Time at which the budget is used up."""
        return (self.since or 0.0) + (self.budget if self.answers else min(self.budget, FIRST_BUDGET))

    def answered(self, prompt: str, began: float) -> None:
        """Record an answer to a call: the service is here, unless it went away after the call ``began``."""
        self.answers += 1
        if prompt != self._newest[0]:
            self._other = self._newest
        self._newest = prompt, self.answers
        self._late.clear()
        self.at_fault.discard(prompt)
        self.alone.pop(prompt, None)
        self._first.pop(prompt, None)
        if self.since is None or began >= self.since:
            self._end()

    def failed(self, prompt: str, error: Unavailable, now: float, *, alone: bool = False) -> bool:
        """Record a failure; return whether it lengthens the pause: of many at once only one does."""
        first = self._first.setdefault(prompt, self.answers)
        self.alone[prompt] += alone
        most = MOST_LATE if error.timed_out else MOST_REFUSED
        if alone and self.alone[prompt] >= most and self.answered_another(prompt, first):
            self.at_fault.add(prompt)
            self._end()
        if prompt in self.at_fault:
            return False
        if error.timed_out and self.since is None:
            self._late.add(prompt)
            if len(self._late) < 2:
                return False
        if self.since is None:
            self.since = now
        self.over = now >= self.until
        longer = now >= self.due or not self._pause
        if longer:
            self.failures += 1
            self._pause = min(2 * self._pause, LONGEST) or SHORTEST
            self.due = now + self._pause * (1 + self.jitter() / 2)
        self.due = min(max(self.due, now + (error.retry_after or 0.0)), self.until)
        return longer

    def answered_another(self, prompt: str, since: int) -> bool:
        """Return whether it answered calls with other prompts after its first ``since`` answers."""
        return (self._newest if self._newest[0] != prompt else self._other)[1] > since

    def _end(self) -> None:
        self.since, self.failures, self._pause = None, 0, 0.0


# ---------------------------------------------------------------------------------- the calls


@define(eq=False)
class _Waiting:
    """A call that waits for its service."""

    prompt: str


class Service:
    """Calls of one service, which wait while it is away.

    Args:
        who: part of the run that uses it, for messages.
        budget: seconds without an answer until calls raise Unavailable.
        key: configuration key of the budget.
    """

    def __init__(self, who: str, budget: float, *, key: str) -> None:
        self._who, self._key = who, key
        self._outage = Outage(budget, JITTER.random)
        self._changes = Changes()
        self._began = ""
        """Time of day at which it went away."""
        self._last = Unavailable()
        self._waiting: list[_Waiting] = []
        self._prober: _Waiting | None = None
        """The call that retries while it is away."""
        self._calling: Counter[str] = Counter()
        """Prompts of running calls."""

    @property
    def away(self) -> Unavailable | None:
        """The last error of a service that is away; None while it is here."""
        return None if self._outage.since is None else Unavailable(str(self._last))

    async def ask(
        self,
        items: Sequence[T],
        call: Callable[[Sequence[T], bool], Awaitable[Sequence[R]]],
        *,
        prompt: Callable[[T], str],
        error: Callable[[R], Unavailable | None],
    ) -> list[R]:
        """Return one result for each item.

        An item whose result still has an error is at fault itself: the service answers the others.

        Args:
            call: returns one result per item; its second argument says whether the service is away.
            prompt: the prompt of an item.
            error: returns the service's error in a result, or None.

        Raises Unavailable if the service has been away for too long.
        """
        prompts = [prompt(item) for item in items]
        found: dict[int, R] = {}
        while left := {i: each for i, each in enumerate(prompts) if i not in found}:
            results = await self._round(
                left, lambda indices, alone: call([items[i] for i in indices], alone), error
            )
            found |= {i: result for i, (result, final) in results.items() if final}
        return [found[i] for i in range(len(items))]

    async def once(
        self, prompt: str, call: Callable[[], Awaitable[R]], error: Callable[[R], Unavailable | None]
    ) -> tuple[R, bool]:
        """Call when the service is here; return the result, and whether it is final or to be retried."""

        async def one(indices: Sequence[int], alone: bool) -> list[R]:
            return [await call()]

        return (await self._round({0: prompt}, one, error))[0]

    async def call(self, prompt: str, call: Callable[[], Awaitable[R]]) -> R:
        """Return the result of a call; retry it while the service is unavailable.

        Raises its last error if the service answers others, and Unavailable as ``ask`` does.
        """

        async def tried() -> R | Exception:
            try:
                return await call()
            except Exception as error:
                if unavailable(error) is None:
                    raise
                return error

        def error(result: R | Exception) -> Unavailable | None:
            return unavailable(result) if isinstance(result, Exception) else None

        final = False
        while not final:
            result, final = await self.once(prompt, tried, error)
        if isinstance(result, Exception):
            raise result
        return result

    async def _round(
        self,
        prompts: Mapping[int, str],
        call: Callable[[Sequence[int], bool], Awaitable[Sequence[R]]],
        error: Callable[[R], Unavailable | None],
    ) -> dict[int, tuple[R, bool]]:
        """Call with all, or with one while the service is away; return results, and which are final."""
        indices = sorted(prompts, key=lambda i: self._outage.alone[prompts[i]])
        waiting = _Waiting(prompts[indices[0]])
        alone = await self._admitted(waiting)
        indices = indices[:1] if alone else indices
        before, began = self._outage.answers, asyncio.get_running_loop().time()
        self._calling.update(prompts[i] for i in indices)
        try:
            with not_counted() if alone else contextlib.nullcontext():
                results = dict(zip(indices, await call(indices, alone), strict=True))
            for i, result in results.items():
                if error(result) is None:
                    self._answered(prompts[i], began)
            for i, result in results.items():
                if (why := error(result)) is not None:
                    self.failed(prompts[i], why, alone=alone)
        finally:
            self._calling.subtract(prompts[i] for i in indices)
            self._calling = +self._calling
            self._end_probe(waiting)
        return {
            i: (result, await self._is_final(prompts[i], error(result), before, alone=alone))
            for i, result in results.items()
        }

    async def _admitted(self, waiting: _Waiting) -> bool:
        """Wait for the service, or for this call's turn to retry; return whether it is its turn."""

        def turn() -> bool | None:
            outage = self._outage
            if outage.over:
                raise self._end()
            if outage.since is None:
                return False
            best = min(self._waiting, key=lambda each: outage.alone[each.prompt])
            now = asyncio.get_running_loop().time()
            if self._prober is not None or best is not waiting or now < outage.due:
                return None
            self._prober = waiting
            return True

        if self._outage.since is None and not self._outage.over:
            return False
        self._waiting.append(waiting)
        try:
            with not_counted():
                return await self._changes.until(turn)
        except asyncio.CancelledError:
            self._end_probe(waiting)
            raise
        finally:
            self._waiting.remove(waiting)

    def _end_probe(self, waiting: _Waiting) -> None:
        if self._prober is waiting:
            self._prober = None
        self._changes.notify()

    def _answered(self, prompt: str, began: float) -> None:
        outage = self._outage
        since, failures = outage.since, outage.failures
        outage.answered(prompt, began)
        if since is not None and outage.since is None:
            seconds = asyncio.get_running_loop().time() - since
            text = f"its service answers again, after {seconds:.0f} s and {failures} failed attempts"
            report("available", self._who, text)

    def failed(self, prompt: str, error: Unavailable, *, alone: bool = False) -> None:
        """Record a failure, perhaps before the whole call has ended."""
        loop, outage = asyncio.get_running_loop(), self._outage
        was_here = outage.since is None
        longer = outage.failed(prompt, error, loop.time(), alone=alone)
        if outage.since is None:
            return
        self._last = error
        loop.call_at(outage.due + SLACK, self._changes.notify)
        if was_here:
            self._began = time.strftime("%H:%M:%S")
        if longer:
            left, again = outage.until - loop.time(), outage.due - loop.time()
            report(
                "unavailable",
                self._who,
                f"its service has been unavailable since {self._began}: {error}. Next attempt in "
                f"{again:.0f} s; the run ends if there is no answer for {left:.0f} s more ({self._key})",
            )

    async def _is_final(self, prompt: str, error: Unavailable | None, before: int, *, alone: bool) -> bool:
        """Return whether a result is final: there is no error, or the prompt is at fault.

        Args:
            before: number of the service's answers before the call.
        """
        outage = self._outage

        def is_at_fault() -> bool | None:
            if prompt in outage.at_fault or outage.answered_another(prompt, before):
                return True
            if outage.since is not None:
                return False
            return None if any(other != prompt for other in self._calling) else True

        if error is None or prompt in outage.at_fault:
            return True
        if alone or not error.timed_out:
            return False
        with not_counted():
            return await self._changes.until(is_at_fault)

    def _end(self) -> Unavailable:
        outage = self._outage
        seconds = outage.until - (outage.since or 0.0)
        first = "" if outage.answers else "; it has never answered"
        return Unavailable(
            f"{self._who}: its service has been unavailable for {seconds:.0f} s ({self._key}{first}), since "
            f"{self._began}; {outage.failures} attempts failed, the last with: {self._last}. "
            "Start it again, and then continue the run"
        )
