"""``grpo-core watch``: serves the report of a running run on the loopback address.

The page equals ``report.html`` and is regenerated on request if the run's files have changed.  The address
has a random part, without which the server answers 404.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import signal
from pathlib import Path

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from grpo_core import ConfigError, Run
from grpo_core.commands.complaints import say
from grpo_plugin_report.report import Files, render

HOST = "127.0.0.1"
INTERRUPTED = 130
"""Exit status after ctrl-C."""
REFRESH = 15
"""Seconds after which a browser reloads the page of a running run."""
CLOSING = 1.0
"""Seconds that open connections get when the server shuts down."""
LOGGER = logging.getLogger(__name__)
LOGGER.addFilter(lambda record: not isinstance((record.exc_info or [None] * 2)[1], HttpProcessingError))
"""Drops log messages about malformed requests, which are answered with status 400."""
WATCHED = ("metrics.jsonl", "events.jsonl")
"""Files whose change triggers a new page."""
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}
"""The address is a secret: browsers must not cache the page or send its address as a referrer."""


class WatchServer:
    """Serves the report of a run on the loopback address; regenerates it if the run has changed.

    Args:
        run: the run.
        port: port; 0 takes any free one.
        refresh: seconds until a browser reloads the page; 0 is never.
    """

    def __init__(self, run: Run, *, port: int = 0, refresh: int = REFRESH) -> None:
        self._run, self._port, self._refresh = run, port, refresh
        self._token = secrets.token_urlsafe(16)
        self._runner: web.AppRunner | None = None
        self._seen: list[tuple[int, int]] | None = None
        self._html = ""
        self._lock = asyncio.Lock()

    async def start(self) -> str:
        """Open the port; return the address.  Raises ConfigError if the port is in use."""
        app = web.Application()
        app.router.add_get("/{place:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None, logger=LOGGER, shutdown_timeout=CLOSING)
        await self._runner.setup()
        site = web.TCPSite(self._runner, HOST, self._port)
        try:
            await site.start()
        except OSError as error:
            await self.aclose()
            raise ConfigError(
                f"--port {self._port}: cannot be opened: {error.strerror}; leave it out to take a free one"
            ) from error
        _, port = self._runner.addresses[0][:2]
        return f"http://{HOST}:{port}/{self._token}/"

    async def _answer(self, request: web.Request) -> web.Response:
        if not hmac.compare_digest(request.match_info["place"].encode(), f"{self._token}/".encode()):
            raise web.HTTPNotFound(text="The address of the page is the one that grpo-core watch printed.")
        headers = dict(HEADERS)
        if self._refresh and self._run.is_running:
            headers["Refresh"] = str(self._refresh)
        body = (await self.html()).encode("utf-8", errors="xmlcharrefreplace")
        return web.Response(body=body, content_type="text/html", charset="utf-8", headers=headers)

    async def html(self) -> str:
        """Return the page; concurrent requests share one rendering."""
        async with self._lock:
            found = [path.stat() for name in WATCHED if (path := self._run.path / name).exists()]
            if (now := [(each.st_mtime_ns, each.st_size) for each in found]) != self._seen:
                self._html = await asyncio.to_thread(lambda: render(Files.read(self._run.path)))
                self._seen = now
            return self._html

    async def aclose(self) -> None:
        """Close the port."""
        if self._runner is not None:
            await self._runner.cleanup()


def watch(directory: Path, /, *, port: int = 0, refresh: int = REFRESH) -> int:
    """Show the report of a run in a browser during the run.

    The page is served on the loopback address, until ctrl-C.

    Parameters
    ----------
    directory
        Directory of the run.
    port
        Port of the page.  0 chooses a free port.
    refresh
        Seconds between two loads of the page during the run.  0 turns that off.
    """
    run = Run(directory)
    if refresh < 0:
        raise ConfigError(f"--refresh is {refresh}; expected a number of seconds, or 0 for never")
    if not 0 <= port < 2**16:
        raise ConfigError(f"--port is {port}; expected a number from 0 to 65535")
    asyncio.run(_serve(WatchServer(run, port=port, refresh=refresh), directory))
    return INTERRUPTED


async def _serve(server: WatchServer, directory: Path) -> None:
    """Serve a page until a signal arrives."""
    ended, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, ended.set)
    say(f"{await server.start()}\nthe report of {directory}; ctrl-C ends the server, not the run")
    try:
        await ended.wait()
    finally:
        await server.aclose()
