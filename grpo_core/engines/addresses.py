"""Addresses of servers for environments and engines, and their descriptions at the start."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from grpo_core.contracts.errors import ConfigError, Unavailable
from grpo_core.processes.services import Client, ServiceError


def checked_url(url: str, *, who: str, remote: bool, risk: str, option: str) -> str:
    """Return the URL without a final slash.

    Args:
        url: address of a server, with the scheme http or https.
        who: part of the run that names it, for messages.
        remote: whether the server may be on another machine.
        risk: the risk of that, as a sentence with its full stop.
        option: key of the configuration that allows it.

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
        raise ConfigError(f"{who}: url = {url!r}; expected something like http://127.0.0.1:8000")
    if not remote and not is_loopback(parts.hostname or ""):
        raise ConfigError(
            f"{who}: {parts.hostname} is another machine. {risk} Keep it on 127.0.0.1, or set {option} = "
            "true if nobody else uses the network between them"
        )
    return url.rstrip("/")


def fetch_json(url: str, *, headers: Mapping[str, str] | None = None, seconds: float = 10.0) -> Any:
    """Return the JSON answer to a GET; for checks at the start, since it blocks.

    Raises Unavailable if there is no answer, its status is not 200, or it is not JSON.
    """

    async def fetch() -> Any:
        client = Client(url, who="check", headers=headers, seconds=seconds)
        try:
            answer = await client.get("")
            if answer.status != 200:
                raise answer.refused()
            return answer.json(object)
        finally:
            await client.aclose()

    try:
        with ThreadPoolExecutor(1) as pool:  # the caller may run an event loop
            return pool.submit(asyncio.run, fetch()).result()
    except ServiceError as error:
        raise Unavailable(str(error)) from error


def is_loopback(host: str) -> bool:
    """Whether a host is a loopback address of this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
