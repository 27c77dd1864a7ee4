"""Addresses of servers for environments and engines, and their descriptions at the start."""

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
"""Largest answer in bytes: descriptions of servers are small, and a wrong server may send anything."""


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
        risk: the risk of that, as a sentence with its full stop.
        option: key of the configuration that allows it.
        example: a valid address, for messages.

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
            "true if nobody else uses the network between them"
        )
    return url.rstrip("/")


def fetch_json(url: str, *, headers: Mapping[str, str] | None = None, seconds: float = 10.0) -> Any:
    """Return the JSON answer to a GET; for checks at the start, since it blocks.

    Proxies of the system are not used, and redirects are not followed.

    Raises Unavailable if there is no answer, its status is not 200, or it is not JSON.
    """
    request = urllib.request.Request(url, headers=dict(headers or {}))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirects)
    try:
        with opener.open(request, timeout=seconds) as response:
            return read_json(response.read(LARGEST), object)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unavailable(f"GET {url}: {getattr(error, 'reason', None) or error}") from error


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Treats a redirect as an error: it could name another machine."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address of this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
