"""An MCP server in a child process, started for a rollout or for a worker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import grpo_core as grpo
from grpo_core.kit import aio

PAGES = 100
"""Largest number of pages of a list of tools, against endless lists."""
LINE = 4096
"""Largest number of characters of a line that a server prints."""


class Server:
    """An MCP client of a command, over its standard input and output.

    The library requires that one task enters and leaves its connection, but rollouts open and close from
    several tasks.  So a dedicated task does both.

    Args:
        command: the program and its arguments.
        variables: environment variables in addition to ``PATH``, ``HOME`` and such.
        timeout: seconds for the start, and for each answer.
    """

    def __init__(self, command: list[str], variables: Mapping[str, str], timeout: float) -> None:
        self._command, self._variables, self._timeout = command, variables, timeout
        self._client: Any = None
        self._end = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[None] | None = None
        self.listed: list[Any] = []

    async def start(self) -> None:
        """Start the server and list its tools.  Raises Unavailable."""
        ready = self._ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._run(ready))
        try:
            async with asyncio.timeout(self._timeout):
                await asyncio.shield(ready)
        except BaseException as error:
            await self.close()
            if not isinstance(error, Exception):  # propagate cancellation
                raise
            raise grpo.Unavailable(self._message("did not start", error)) from error

    @property
    def ended(self) -> bool:
        return self._task is None or self._task.done() or self._end.is_set()

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the text of a tool's answer.  Raises ToolFailed, and SessionLost if the server is gone."""
        from mcp import MCPError

        if self.ended:
            raise grpo.SessionLost(self._message(f"ended before the call of {name!r}", None))
        try:
            async with asyncio.timeout(self._timeout):
                result = await self._client.call_tool(name, dict(arguments))
        except MCPError as error:
            if self._gone(error):
                self._end.set()  # the task waits for this event and does not notice the end of the server
                raise grpo.SessionLost(self._message(f"ended during the call of {name!r}", error)) from error
            raise ToolFailed(str(error)) from error
        except Exception as error:
            self._end.set()  # a late answer would be taken for the next one's
            raise grpo.SessionLost(self._message(f"did not answer the call of {name!r}", error)) from error
        text = "\n".join(_text(part) for part in result.content)
        if getattr(result, "is_error", False):
            raise ToolFailed(text)
        return text

    async def close(self) -> None:
        """End the server; waits until its process has ended."""
        self._end.set()
        if self._task is None:
            return
        if self._ready is not None and not self._ready.done():
            self._task.cancel()  # a server that hangs during its start would not react to the event
        await asyncio.wait([self._task])
        if not self._task.cancelled():
            self._task.exception()  # reported already, or irrelevant after the end

    async def _run(self, ready: asyncio.Future[None]) -> None:
        from mcp import Client, StdioServerParameters
        from mcp.client.stdio import stdio_client

        program, *arguments = self._command
        parameters = StdioServerParameters(command=program, args=arguments, env=dict(self._variables))
        try:
            with _printed() as log:
                async with Client(
                    stdio_client(parameters, errlog=log),
                    read_timeout_seconds=self._timeout,
                    message_handler=self._heard,
                ) as client:
                    self._client = client
                    self.listed = await self._all_tools()
                    ready.set_result(None)
                    await self._end.wait()
        except BaseException as error:
            if ready.done():
                raise
            first = aio.root_cause(error)
            ready.set_exception(first if isinstance(first, Exception) else ConnectionError("it was ended"))
            ready.exception()  # there may be no waiter left

    async def _heard(self, message: Any) -> None:
        """End a server after a line that is no message: its answers can no longer be attributed."""
        if isinstance(message, Exception):
            self._end.set()

    async def _all_tools(self) -> list[Any]:
        tools, cursor = [], None
        for _ in range(PAGES):
            page = await self._client.list_tools(cursor=cursor)
            tools += page.tools
            cursor = page.next_cursor
            if cursor is None:
                return tools
        raise ValueError(f"it lists its tools on more than {PAGES} pages")

    def _gone(self, error: Any) -> bool:
        from mcp.types import CONNECTION_CLOSED

        # servers may use this code for other errors as well
        lost = error.code == CONNECTION_CLOSED and error.message == "Connection closed"
        return lost or self.ended

    def _message(self, what: str, error: BaseException | None) -> str:
        if isinstance(error, TimeoutError):
            what = f"{what} within {self._timeout:g} s"
        elif error is not None:
            what = f"{what}: {type(error).__name__}: {error}"
        return f"mcp: the server {' '.join(self._command)!r} {what}"


@contextlib.contextmanager
def _printed() -> Iterator[TextIO]:
    """Yield a file for a server's standard error, whose lines are printed without control characters."""
    reading, writing = os.pipe()

    def printing() -> None:
        with open(reading, encoding="utf-8", errors="replace") as lines:
            while line := lines.readline(LINE):
                print(repr(line.rstrip("\n"))[1:-1], file=sys.stderr, flush=True)

    threading.Thread(target=printing, name="stderr of an MCP server", daemon=True).start()
    with open(writing, "w", encoding="utf-8") as file:
        yield file


class ToolFailed(Exception):  # noqa: N818 - named after the outcome
    """Raised for a tool's error, which becomes a message for the model."""

    def __repr__(self) -> str:
        return str(self)


def _text(part: Any) -> str:
    if part.type == "text":
        return str(part.text)
    if part.type == "resource":
        return str(getattr(part.resource, "text", f"[{part.resource.uri}]"))
    if part.type == "resource_link":
        return f"[{part.uri}]"
    return f"[{part.type}]"  # images and sounds are not supported
