"""Environments in their own child processes.

    EnvironmentProcess (here)   ------>   EnvironmentHost (child, main thread)   ------>   plugin code

Plugin code that evaluates may hang, crash, or call C code that holds the interpreter: its process is killed
at the deadline and started anew.  A batch that raises, dies or overruns is tried again one episode at a
time (one group at a time if the environment compares the rollouts of a group), so that only the culprit
loses its feedback.  Sessions die with their process: then their rollouts are lost, and played again.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from grpo_core.config import EnvironmentConfig
from grpo_core.environments.host import UNREADABLE, units
from grpo_core.errors import ChildDied, DeadlineExceeded, GrpoError, PluginError, describe
from grpo_core.plugins.selection import ALL_PLUGINS, PluginSelection
from grpo_core.processes import Child, RemoteTraceback
from grpo_core.protocols import Environment
from grpo_core.records import Episode, Feedback, Prompt, SessionStart
from grpo_core.restarts import RestartBudget

T = TypeVar("T")
R = TypeVar("R")

GIVE_UP_AFTER = 20
"""Number of failures in a row after which the environment, not an episode, is considered at fault."""

MAX_DEATHS = 3
"""Number of deaths in a row, during start or while offering prompts, after which it is not restarted."""

CLOSING = 5.0
"""Seconds for closing open sessions when the process ends."""


class EnvironmentProcess:
    """An ``EnvironmentClient`` whose environment lives in a killable child process without CUDA.

    It makes one call at a time.  Every method but ``aclose`` starts the process if it does not run.

    Args:
        task: name of the task, which is set on its prompts.
        spec: the environment's name, as in ``math:sort``.
        options: options of the environment's factory.
        plugins: selection of the plugins that its process loads.
        log: file for the environment's output.
    """

    def __init__(
        self,
        task: str,
        spec: str,
        options: Mapping[str, Any] | None = None,
        *,
        config: EnvironmentConfig | None = None,
        plugins: PluginSelection = ALL_PLUGINS,
        log: Path | None = None,
    ) -> None:
        self.task = task
        self.max_turns = Environment.max_turns
        self.needs_group = Environment.needs_group
        self.success = Environment.success
        self.starts = 0
        self.first_traceback = ""
        """Traceback of the first evaluation that failed."""
        self._config = config or EnvironmentConfig()
        self._made_with = {
            "task": task,
            "spec": spec,
            "options": dict(options or {}),
            "plugins": plugins,
            "concurrency": self._config.concurrency,
        }
        self._log = log
        self._child: Child | None = None
        self._closed = False
        self._turn = asyncio.Lock()
        self._has_sessions = False
        self._tools: tuple[Mapping[str, Any], ...] = ()
        self._closing: list[str] = []
        self._closer: asyncio.Task[None] | None = None
        self._who = f"task {task!r}"

    async def start(self) -> None:
        """Make the environment.  Raises PluginError or ConfigError if that is impossible."""
        async with self._turn:
            await self._started()

    async def prompts(self, split: str) -> list[Prompt]:
        """Return the prompts of ``"train"`` or ``"validation"``, each with an id and the task's name."""
        pickled = await self._call("prompts", split)
        try:
            prompts: list[Prompt] = pickle.loads(pickled)
        except Exception as error:
            raise PluginError(f"{self._who}: prompts({split!r}): {UNREADABLE}: {describe(error)}") from error
        return prompts

    async def solve(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """Return a reply with a full reward for each prompt, or None where the environment knows none."""
        replies: list[str | None] = await self._call("solve", list(prompts))
        return replies

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        """Open a session for each prompt, or report why not; without sessions, return only the tools."""
        if self._child is None:
            await self.start()
        if not self._has_sessions:
            return [SessionStart(tools=self._tools)] * len(prompts)
        parts = [[pair] for pair in prompts.items()]
        return await self._in_parts("open", parts, lambda error: SessionStart(error=error))

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Feedback]:
        """Return feedback for each episode, in order; a failed one has an error and no reward."""
        parts = units(episodes, whole_groups=self.needs_group)
        return await self._in_parts("evaluate", parts, lambda error: Feedback(error=error))

    async def close(self, sessions: Sequence[str]) -> None:
        """Let the process close sessions as soon as it is free, at the latest in ``aclose``."""
        if self._has_sessions:
            self._closing += sessions
            if self._closer is None:
                self._closer = asyncio.create_task(self._close_soon(), name=f"closing of {self._who}")

    async def aclose(self) -> None:
        """Close the open sessions and end the process; waiting calls raise ChildDied."""
        self._closed = True
        await self._end()
        if self._closer is not None:
            await asyncio.wait([self._closer])

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            if self._has_sessions and child.alive:
                with contextlib.suppress(GrpoError):
                    await child.call("end", seconds=CLOSING)
            await child.aclose()

    async def _close_soon(self) -> None:
        async with self._turn:
            while self._closing:
                sessions, self._closing = self._closing, []
                if self._child is not None and self._child.alive:
                    with contextlib.suppress(GrpoError):  # it died, and its sessions with it
                        await self._child.call("close", sessions, seconds=self._config.deadline)
            self._closer = None

    async def _in_parts(self, method: str, parts: list[list[T]], failed: Callable[[str], R]) -> list[R]:
        """Return one result for each item, from one call or, if it fails, from a call for each part."""
        if not parts:
            return []
        attempt: list[R] | Exception = await self._attempt(method, [item for part in parts for item in part])
        if not isinstance(attempt, Exception):
            return attempt
        results: list[R] = []
        in_a_row = 0
        for part in parts:
            if len(parts) > 1 and in_a_row < GIVE_UP_AFTER:
                attempt = await self._attempt(method, part)
            if isinstance(attempt, Exception):
                self.first_traceback = self.first_traceback or _traceback(attempt)
                results += [failed(describe(attempt))] * len(part)
                in_a_row += 1
            else:
                results += attempt
                in_a_row = 0
        return results

    async def _attempt(self, method: str, items: Sequence[Any]) -> list[Any] | Exception:
        """Return the results or the error.  Raises only if the environment cannot be made."""
        async with self._turn:
            child = await self._started()
            try:
                results: list[Any] = await self._ask(child, method, list(items), self._config.deadline)
            except Exception as error:
                return error
            return results

    async def _call(self, method: str, argument: Any) -> Any:
        async def ask() -> Any:
            return await self._ask(await self._started(), method, argument, self._config.start_deadline)

        async with self._turn:
            return await RestartBudget(MAX_DEATHS).run(ask, on=ChildDied)

    async def _ask(self, child: Child, method: str, argument: Any, seconds: float) -> Any:
        try:
            return await child.call(method, argument, seconds=seconds)
        except asyncio.CancelledError:
            # It may be busy for long, and the next caller's time would run meanwhile.  Where there are
            # sessions, that is better than to lose them.
            if not self._has_sessions:
                child.kill()
            raise

    async def _started(self) -> Child:
        """Return the running child, or a new one.  Raises PluginError if the environment cannot be made."""
        if self._child is not None and self._child.alive:
            return self._child
        if self._closed:
            raise ChildDied(f"the environment of task {self.task!r} is closed")
        await self._end()
        try:
            return await RestartBudget(MAX_DEATHS).run(self._start, on=ChildDied)
        except ChildDied as error:
            raise self._cannot_start(error) from error

    def _cannot_start(self, error: GrpoError) -> PluginError:
        return PluginError(f"task {self.task!r}: the environment cannot be started: {error}")

    async def _start(self) -> Child:
        """Start a child.  Raises ChildDied, PluginError."""
        self.starts += 1
        child = Child(
            "grpo_core.environments.host:EnvironmentHost",
            self._made_with,
            name=f"environment of task {self.task!r}",
            environ={"CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"},  # sets in the same order
            log=self._log,
        )
        try:
            description = await child.started(seconds=self._config.start_deadline)
        except BaseException as error:
            await child.aclose(seconds=0)
            if isinstance(error, DeadlineExceeded):
                raise self._cannot_start(error) from error
            raise
        self._child = child
        self._who = description["who"]
        self.max_turns = description["max_turns"]
        self.needs_group = description["needs_group"]
        self.success = description["success"]
        self._has_sessions = description["sessions"]
        self._tools = description["tools"]
        return child


def _traceback(error: BaseException) -> str:
    """Return the child's traceback if the error comes from there, otherwise the error as text."""
    cause = error.__cause__
    return str(cause) if isinstance(cause, RemoteTraceback) else describe(error)
