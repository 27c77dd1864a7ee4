"""The environment ``mcp:COMMAND``: adds the tools of an MCP server to another environment."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import os
import shlex
import shutil
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs import define, field

import grpo_core as grpo
from grpo_core.kit import evaluate_of
from grpo_plugin_mcp.server import Server

SPARE = 10.0
"""Margin of a call's time limit over the server's, in seconds."""


DEADLINE = 30.0
"""Time limit of calls of an environment that declares none, as in grpo-core."""


@define(eq=False)
class Session:
    """The session of a rollout: its tools, their server, and the session of the other environment."""

    server: Server
    own: Any = None
    tools: list[Any] = field(factory=list)


class ToolsOfServer(grpo.Environment):
    """Adds the tools of an MCP server to another environment.

    Prompts, rewards, turns, sessions and further tools come from the other environment.

    Args:
        command: the server's command line, such as ``python server.py``.  It talks over standard input and
            output.
        env: name of the environment with the prompts and rewards.
        options: options of that environment.
        tools: names of the tools that the model may call; empty allows all.
        server: "rollout" starts a server for each rollout; "worker" starts one that all rollouts share, for
            stateless tools.
        variables: names of environment variables for the server, in addition to ``PATH``, ``HOME`` and such.
        max_turns: largest number of completions of a rollout.
        timeout: seconds for the server's start, and for each answer.
        calls_at_once: number of concurrent calls of each worker.
    """

    def __init__(
        self,
        command: str,
        *,
        env: str,
        options: Mapping[str, Any] | None = None,
        tools: Sequence[str] = (),
        server: Literal["rollout", "worker"] = "rollout",
        variables: Sequence[str] = (),
        max_turns: int = 8,
        timeout: float = 30.0,
        calls_at_once: int = 32,
    ) -> None:
        if timeout <= 0 or calls_at_once < 1:
            raise grpo.ConfigError(
                f"mcp: timeout = {timeout}, calls_at_once = {calls_at_once}; expected more than 0, at least 1"
            )
        if missing := [name for name in variables if name not in os.environ]:
            raise grpo.ConfigError(
                f"mcp: the environment variable {missing[0]} is not set; tasks.NAME.env_vars can set it"
            )
        self._command = _found(command)
        self._variables = {name: os.environ[name] for name in variables}
        self._allowed, self._shares, self._timeout = tuple(tools), server == "worker", timeout
        self._shared: Server | None = None
        self._starting = asyncio.Lock()
        self._checked = not tools
        self._environment = grpo.make_environment(env, **(options or {}))
        self._check()
        inner = self._environment
        self.needs_group = bool(getattr(inner, "needs_group", False))
        self.success = getattr(inner, "success", None)
        self.combine = getattr(inner, "combine", {})
        self.tools = getattr(inner, "tools", ())
        self.max_turns = max(max_turns, getattr(inner, "max_turns", 1))
        self._has_sessions = _own(inner, "open")
        self._limit(calls_at_once)
        if self._awaits:
            self.evaluate = self._judged_later  # type: ignore[method-assign]

    def _limit(self, calls_at_once: int) -> None:
        """Set the number of concurrent calls, and their time limit.

        A limit of the other environment also applies to its tools and sessions, which are called directly.
        """
        inner = self._environment
        own: int = getattr(inner, "concurrency", 0) or getattr(self._evaluate, "concurrency", 0)
        played = self._has_sessions or len(self.tools) > 0
        self._judging = asyncio.Semaphore(own) if own else contextlib.nullcontext()
        self.concurrency = own if own and played else max(calls_at_once, own)
        seconds = getattr(inner, "deadline", None) or DEADLINE
        waits = math.ceil(self.concurrency / own) if own else 1
        starting = self._timeout + SPARE + (seconds if self._has_sessions else 0.0)
        self.deadline = max(starting, waits * seconds)

    def prompts(self, split: str) -> Sequence[grpo.Prompt]:
        self._check_tools()
        prompts: Sequence[grpo.Prompt] = self._environment.prompts(split)
        return prompts

    def prompt(self, row: Mapping[str, Any]) -> Any:
        self._check_tools()
        prompt = getattr(self._environment, "prompt", None)
        return prompt(row) if callable(prompt) else super().prompt(row)

    def solve(self, prompt: grpo.Prompt) -> str | None:
        solve = getattr(self._environment, "solve", None)
        return solve(prompt) if solve else None

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> Any:
        return self._evaluate(_inner(episodes))

    async def _judged_later(self, episodes: Sequence[grpo.Episode]) -> Any:
        async with self._judging:  # calls of tools have a separate limit
            return await self._evaluate(_inner(episodes))

    def open(self, prompt: grpo.Prompt) -> Awaitable[Session]:
        """Open the other environment's session, in this thread if it is not async, and then the server."""
        own = self._environment.open(prompt) if self._has_sessions else None
        return self._opened(own)

    async def _opened(self, own: Any) -> Session:
        own = await own if inspect.isawaitable(own) else own
        try:
            server = await self._server()
        except BaseException:
            await self._closed(None, self._closing(own))
            raise
        session = Session(server, own)
        try:
            listed = [self._tool(server, each) for each in self._chosen(server)]
            session.tools = [*listed, *(grpo.tools_of(own) if self._has_sessions else ())]
        except BaseException:
            await self.close(session)
            raise
        return session

    def close(self, session: Session) -> Awaitable[None]:
        """Close the other environment's session, in this thread if it is not async, and then the server."""
        server = None if self._shares else session.server
        try:
            closing = self._closing(session.own)
        except Exception as error:  # the server must be closed in any case
            closing = _raised(error)
        return self._closed(server, closing)

    def _closing(self, own: Any) -> Any:
        close = getattr(self._environment, "close", None)
        return close(own) if self._has_sessions and close else None

    async def _closed(self, server: Server | None, closing: Any) -> None:
        try:
            if inspect.isawaitable(closing):
                await closing
        finally:
            if server is not None:
                await server.close()

    async def aclose(self) -> None:
        if self._shared is not None:
            await self._shared.close()
        closing = getattr(self._environment, "aclose", lambda: None)()
        if inspect.isawaitable(closing):
            await closing

    # ------------------------------------------------------------------------------ the server

    async def _server(self) -> Server:
        """Return the server of a new rollout; a shared one is restarted after it has ended."""
        if not self._shares:
            return await self._started()
        async with self._starting:
            if self._shared is None or self._shared.ended:
                if self._shared is not None:
                    await self._shared.close()
                self._shared = await self._started()
            return self._shared

    async def _started(self) -> Server:
        server = Server(self._command, self._variables, self._timeout)
        await server.start()
        return server

    def _chosen(self, server: Server) -> list[Any]:
        names = {tool.name for tool in server.listed}
        for name in self._allowed:
            if name not in names:
                near = grpo.did_you_mean(name, names)
                raise grpo.PluginError(
                    f"mcp: the server has no tool {name!r}.{near} It has {', '.join(sorted(names)) or 'none'}"
                )
        return [tool for tool in server.listed if not self._allowed or tool.name in self._allowed]

    def _check_tools(self) -> None:
        """Start a server once to check the names in ``tools``.  Raises PluginError."""
        if self._checked:
            return

        async def looked() -> None:
            server = await self._started()
            try:
                self._chosen(server)
            finally:
                await server.close()

        asyncio.run(looked())
        self._checked = True

    def _tool(self, server: Server, listed: Any) -> grpo.Tool:
        async def call(arguments: Mapping[str, Any]) -> str:
            return await server.call(listed.name, arguments)

        return grpo.Tool(
            name=listed.name,
            description=listed.description or "",
            parameters=listed.input_schema,
            call=call,
        )

    def _check(self) -> None:
        inner, kind = self._environment, type(self._environment)
        if _own(inner, "run"):
            raise grpo.ConfigError("mcp: env is an agent, which calls its tools by itself")
        evaluate = evaluate_of(inner)
        for method, defined in (("prompts", getattr(inner, "prompts", None)), ("evaluate", evaluate)):
            if not callable(defined):
                raise grpo.ConfigError(f"mcp: env: {kind.__name__} has no method {method!r}")
        self._evaluate: Any = evaluate
        self._awaits = inspect.iscoroutinefunction(evaluate)


def _found(command: str) -> list[str]:
    """Split a command line.  Raises ConfigError if its program does not exist."""
    try:
        parts = shlex.split(command)
    except ValueError as error:
        raise grpo.ConfigError(f"mcp: the command {command!r} cannot be split: {error}") from error
    if not parts or shutil.which(parts[0]) is None:
        program = parts[0] if parts else command
        raise grpo.ConfigError(
            f"mcp: there is no program {program!r}; expected a command, as mcp:python server.py"
        )
    return parts


def _inner(episodes: Sequence[grpo.Episode]) -> list[grpo.Episode]:
    """Return episodes with the sessions of the other environment."""
    return [attrs.evolve(each, session=getattr(each.session, "own", None)) for each in episodes]


async def _raised(error: Exception) -> None:
    raise error


def _own(environment: Any, name: str) -> bool:
    """Return whether an environment defines an optional method."""
    method = vars(environment).get(name) or getattr(type(environment), name, None)
    return method not in (None, getattr(grpo.Environment, name))
