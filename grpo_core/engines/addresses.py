"""Addresses of servers that an environment or an engine asks, and what one says at the start."""

from __future__ import annotations

import http.client
import ipaddress
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from grpo_core.contracts.errors import ConfigError, Unavailable
from grpo_core.text.untrusted import read_json

LARGEST = 1 << 24
"""Bytes of an answer at most: descriptions of servers are small, and a wrong server may send anything."""


def checked_url(
    url: str,
    *,
    who: str,
    remote: bool,
    risk: str,
    option: str,
    example: str = "http://127.0.0.1:8000",
) -> str:
    """Return the URL without a final slash.

    Args:
        url: address of a server, with the scheme http or https.
        who: part of the run that names it, for messages.
        remote: whether the server may be on another machine.
        risk: what speaks against that, as a sentence with its full stop.
        option: key of the configuration that allows it.
        example: address that is right, for messages.

    Raises ConfigError for an invalid URL, for one with a password, or for one of another machine without
    ``remote``.
    """
    try:
        parts = urlsplit(url)
        if parts.password is not None:  # this message is written to the run's files
            raise ConfigError(f"{who}: the url has a password; give it as an environment variable")
        valid = url.startswith(("http://", "https://")) and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        valid = False
    if not valid:
        raise ConfigError(f"{who}: url = {url!r}; expected something like {example}")
    if not remote and not is_loopback(parts.hostname or ""):
        raise ConfigError(
            f"{who}: {parts.hostname} is another machine. {risk} Keep it on 127.0.0.1, or set {option} = "
            "true if the network between is yours alone"
        )
    return url.rstrip("/")


def fetch_json(url: str, *, headers: Mapping[str, str] | None = None, seconds: float = 10.0) -> Any:
    """Return the JSON that a server answers to GET; for checks at the start, since it blocks.

    Proxies of the system are not used, and redirects are not followed.

    Raises Unavailable if nothing answers, or if the answer has another status than 200 or is no JSON.
    """
    request = urllib.request.Request(url, headers=dict(headers or {}))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
    try:
        with opener.open(request, timeout=seconds) as response:
            return read_json(response.read(LARGEST), object)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(f"GET {url}: {getattr(error, 'reason', None) or error}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Takes a redirect for an error: it could name another machine."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by an address that no other machine reaches."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
