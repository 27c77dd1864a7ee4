"""The client of everything that a run asks over HTTP: bounded in time and size, without redirects.

A request ends within its seconds, whatever the server sends: headers, informational responses, body and body
of an error.  An answer is read to a bound, uncompressed, for every status.  A redirect is an error: another
machine would receive the request, and could forge the answer.  A message quotes a server in one line, without
control characters.
"""

from __future__ import annotations

import asyncio
import contextlib
import email.utils
import itertools
import math
import random
import ssl
import time
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urljoin, urlsplit

from attrs import field, frozen

from grpo_core.contracts.errors import ConfigError, GrpoError, Unavailable, one_line
from grpo_core.contracts.unicode import inert, read_json, well_formed

if TYPE_CHECKING:
    import aiohttp

T = TypeVar("T")

BUSY = frozenset({429, 502, 503, 504})
"""Statuses that ask to retry later, also from a proxy: the request had no effect."""
LARGEST = 32 << 20
"""Default of the largest size of an answer in bytes."""
LONGEST = 300
"""Largest number of characters of an answer in a message."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
"""Seconds of the first and the longest pause before a call is repeated."""
LONGEST_WAIT = 3600.0
"""Largest number of seconds of a ``Retry-After`` that is believed."""


class ServiceError(GrpoError):
    """Raised for an answer that cannot be used; the same request would get the same answer.

    Attributes:
        status: HTTP status of the answer; 0 without one.
    """

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class NotSent(Unavailable):
    """Raised if a request had no effect: there is no connection, or the server is busy."""


@frozen
class Answer:
    """An answer of a service.

    Attributes:
        what: the request, for messages.
        text: the body, with U+FFFD for bytes that are not UTF-8.
        cookies: the cookies that it sets.
    """

    what: str
    status: int
    text: str = field(repr=False)
    cookies: Mapping[str, str] = field(factory=dict)

    def json(self, kind: type[T]) -> T:
        """Return the body as JSON of a kind: dict, list, or object for any.  Raises ServiceError."""
        try:
            return read_json(self.text, kind)
        except ValueError as error:
            raise ServiceError(
                f"{self.what}: expected JSON, got {said(repr(self.text[:LONGEST]))} ({said(str(error))})",
                status=self.status,
            ) from None

    def refused(self, remedy: str = "") -> ServiceError:
        """Describe an answer with an error status."""
        return ServiceError(
            f"{self.what}: status {self.status}: {said(self.text)}{remedy}", status=self.status
        )


def said(text: str) -> str:
    """Return what a server says as one line without control characters, cut."""
    return inert(one_line(text, LONGEST))


class Client:
    """A client of one service.

    Args:
        url: address of the service; requests go to its host alone.
        who: part of the run that asks, for messages.
        key: sent as a bearer token unless empty.
        headers: further headers of each request.
        seconds: time limit of a whole request.
        connect_seconds: time limit of connecting.
        busy: statuses after which a request is retried later.
        largest: largest size of an answer in bytes.

    Raises ConfigError if the address is none, or if the key cannot be sent.
    """

    def __init__(
        self,
        url: str,
        *,
        who: str,
        key: str = "",
        headers: Mapping[str, str] | None = None,
        seconds: float,
        connect_seconds: float = 30.0,
        busy: Collection[int] = BUSY,
        largest: int = LARGEST,
    ) -> None:
        sent = {"Accept-Encoding": "identity", **(headers or {})}
        if key:
            sent["Authorization"] = f"Bearer {key}"
        for name, value in sent.items():
            if not value.isprintable() or not value.isascii() or " ".join(value.split()) != value:
                what = "the key" if name == "Authorization" else f"the header {name}"
                raise ConfigError(
                    f"{who}: {what} has a character that no header may have, such as a blank or a line end "
                    "at its end; check the variable that holds it"
                )
        try:
            parts = urlsplit(url)
            valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            valid = False
        if not valid:
            raise ConfigError(f"{who}: {url!r} is no address; expected something like http://127.0.0.1:8000")
        self.url, self._who, self._key, self._headers = url.rstrip("/"), who, key, sent
        self._seconds, self._connect_seconds = seconds, connect_seconds
        self._busy, self._largest = frozenset(busy), largest
        self._http: aiohttp.ClientSession | None = None

    async def get(self, path: str, **how: Any) -> Answer:
        """Return the answer to a GET; see ``request``."""
        return await self.request("GET", path, **how)

    async def post(self, path: str, body: Any = None, **how: Any) -> Answer:
        """Return the answer to a POST of JSON; see ``request``."""
        return await self.request("POST", path, body=body, **how)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        cookies: Mapping[str, str] | None = None,
        seconds: float | None = None,
        largest: int | None = None,
    ) -> Answer:
        """Return the answer, whatever its status, unless that asks to retry.

        Args:
            seconds, largest: limits instead of the client's.

        Raises Unavailable if a later attempt may get an answer (NotSent if the request had no effect), and
        ServiceError if none will.
        """
        what = f"{self._who}: {method} {self.url}{path}"
        async with (
            self._limited(what, self._seconds if seconds is None else seconds),
            self._session().request(
                method,
                self.url + path,
                json=body,
                params=query,
                headers=headers,
                cookies=cookies,
                allow_redirects=False,
            ) as response,
        ):
            return await self._read(what, response, self._largest if largest is None else largest)

    @contextlib.asynccontextmanager
    async def _limited(self, what: str, seconds: float) -> AsyncIterator[None]:
        """Limit the time of a request, and convert the errors of its connection."""
        import aiohttp

        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError as error:
            away = Unavailable(f"{what}: no answer within {seconds:g} s")
            away.timed_out = not isinstance(error, aiohttp.ConnectionTimeoutError)
            raise away from error
        except (aiohttp.ClientSSLError, ssl.SSLError) as error:
            raise ServiceError(f"{what}: {_of_tls(error)}") from error
        except aiohttp.ClientConnectorError as error:
            raise NotSent(f"{what}: no connection: {self._said(error)}") from error
        except aiohttp.WSServerHandshakeError as error:
            raise Unavailable(
                f"{what}: no WebSocket: status {error.status}: {self._said(error.message)}"
            ) from error
        except aiohttp.ClientResponseError as error:
            is_tls = "\\x15\\x03" in error.message  # the beginning of an alert
            secure = "; the server expects https://" if is_tls else ""
            raise ServiceError(
                f"{what}: the answer is not HTTP: {self._said(error.message)}{secure}"
            ) from error
        except ValueError as error:  # such as headers that a server said
            raise ServiceError(f"{what}: the request cannot be sent: {self._said(error)}") from error
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Unavailable(f"{what}: {type(error).__name__}: {self._said(error)}") from error

    async def _read(self, what: str, response: aiohttp.ClientResponse, largest: int) -> Answer:
        if 300 <= response.status < 400:
            raise _redirected(what, response)
        try:
            body = await read_body(response.content.iter_any(), response.headers, largest)
        except ValueError as error:
            raise ServiceError(f"{what}: {said(str(error))}", status=response.status) from error
        text = self._without_key(well_formed(body.decode(errors="replace")))
        answer = Answer(what, response.status, text, {n: m.value for n, m in response.cookies.items()})
        if response.status in self._busy:
            raise NotSent(str(answer.refused()), retry_after=retry_after(response.headers))
        return answer

    async def connect(self, path: str) -> aiohttp.ClientWebSocketResponse:
        """Return a WebSocket, whose messages are within the largest size.

        Raises NotSent without a connection, and ServiceError after a redirect.
        """
        what = f"{self._who}: {self.url}{path}"
        try:
            async with self._limited(what, self._seconds):
                return await self._session().ws_connect(self.url + path, max_msg_size=self._largest)
        except Unavailable as error:
            raise NotSent(str(error)) from error

    async def aclose(self) -> None:
        """Close the connections."""
        if self._http is not None:
            await self._http.close()

    def _session(self) -> aiohttp.ClientSession:
        if self._http is None or self._http.closed:
            try:
                import aiohttp
            except ImportError:
                raise ConfigError(f"{self._who}: needs aiohttp: pip install aiohttp") from None
            # limit=0: callers limit their requests, so that time limits exclude waiting for a connection.
            # A shared cookie jar would mix rollouts.
            watch = aiohttp.TraceConfig()
            watch.on_request_redirect.append(self._refuse)  # ws_connect has no option for it
            self._http = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers=self._headers,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_seconds),
                auto_decompress=False,
                trace_configs=[watch],
            )
        return self._http

    def _without_key(self, text: str) -> str:
        """Hide the key, which a server may repeat: answers are stored."""
        return text.replace(self._key, "[key]") if self._key else text

    def _said(self, text: object) -> str:
        return said(self._without_key(str(text)))

    async def _refuse(self, _: Any, __: Any, found: aiohttp.TraceRequestRedirectParams) -> None:
        found.response.close()
        raise _redirected(f"{self._who}: {found.method} {self.url}", found.response)


def _redirected(what: str, response: aiohttp.ClientResponse) -> ServiceError:
    """Describe a redirect, which would let another machine receive the request and forge the answer."""
    target = urlsplit(urljoin(str(response.url), response.headers.get("Location", "")))
    return ServiceError(
        f"{what}: status {response.status}: a redirect from {response.url.host}:{response.url.port} to "
        f"{said(f'{target.scheme}://{target.netloc}')}; redirects are not followed: set the final address",
        status=response.status,
    )


async def retried(call: Callable[[], Awaitable[T]], retries: int, on: type[Unavailable] = NotSent) -> T:
    """Return the result of a call; repeat it after a pause if a service is unavailable.

    Args:
        retries: number of calls after the first.
        on: the errors after which another call does no harm.

    Raises the last error, with the number of calls; at once if the service asks for more than
    ``LONGEST_PAUSE`` seconds.
    """
    for made in itertools.count(1):
        try:
            return await call()
        except on as error:
            backoff = min(FIRST_PAUSE * 2 ** (made - 1), 8.0) * random.uniform(1.0, 1.25)
            pause = backoff if error.retry_after is None else error.retry_after
            if made > retries or pause > LONGEST_PAUSE:
                error.args = (f"{error} ({made} attempts)" if made > 1 else str(error),)
                raise
        await asyncio.sleep(pause)
    raise AssertionError("the last call returns or raises")


def retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds in a Retry-After header, which may be a date; None without a sensible one."""
    given = headers.get("Retry-After", "")
    try:
        seconds = float(given)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(given).timestamp() - time.time()
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(seconds, 0.0), LONGEST_WAIT) if math.isfinite(seconds) else None


def _of_tls(error: Exception) -> str:
    """Describe an error of TLS."""
    text = said(str(getattr(error, "certificate_error", error)))
    if "CERTIFICATE" in text.upper():
        return f"its certificate is not accepted: {text}"
    if "WRONG_VERSION_NUMBER" in text or "RECORD_LAYER" in text:
        return f"the server does not speak TLS; use http:// ({text})"
    return f"no TLS connection: {text}"


async def read_body(parts: AsyncIterable[bytes], headers: Mapping[str, str], largest: int) -> bytes:
    """Return the body of an answer.

    A client asks for it with ``Accept-Encoding: identity``: a few compressed bytes can unfold to gigabytes.

    Args:
        headers: of the answer, with case-insensitive names.
        largest: largest number of bytes.

    Raises ValueError if it is compressed, or longer.
    """
    encoding = headers.get("Content-Encoding", "identity")
    if encoding != "identity":
        raise ValueError(f"the answer is compressed ({encoding[:50]!r}); expected it uncompressed")
    body = bytearray()
    async for part in parts:
        body += part
        if len(body) > largest:
            raise ValueError(f"the answer has more than {largest:,} bytes")
    return bytes(body)
