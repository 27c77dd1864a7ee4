"""Environments in their own child processes.

    EnvironmentProcess (here)   ------>   EnvironmentHost (child, main thread)   ------>   plugin code

Plugin code that evaluates may hang, crash, or call C code that holds the interpreter: its process is killed
at the deadline and restarted.  A ``Dispatcher`` decides what is called together, and what is called again.
Sessions die with their process: then their rollouts are lost, and played again.  Survived failures are
reported (``grpo_core.contracts.incidents``); results of the wrong type or number end the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from attrs import evolve, field, frozen

from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import (
    ChildDied,
    DeadlineExceeded,
    GrpoError,
    PluginError,
    SelectionError,
    Unavailable,
    describe,
    fault_of,
)
from grpo_core.contracts.incidents import report
from grpo_core.contracts.playing import Player
from grpo_core.contracts.protocols import Description
from grpo_core.contracts.records import AgentClient, Episode, Judgement, Prompt, SessionStart
from grpo_core.environments.dispatcher import Dispatcher, Failure, Services
from grpo_core.environments.host import GRACE, UNREADABLE, made
from grpo_core.plugins.host import PluginHost
from grpo_core.plugins.installed import ALL_PLUGINS, PluginSelection
from grpo_core.processes import secrets
from grpo_core.processes.aio import FairSemaphore, repeated
from grpo_core.processes.child import Child, ThreadChild
from grpo_core.processes.interpreters import Interpreter, from_here, variables_of
from grpo_core.text.credentials import Mask

MAX_DEATHS = 3
"""Deaths in a row, at the start or while it lists prompts, after which it is not restarted."""

CLOSING = 5.0
"""Seconds for closing open sessions and the environment when the process ends."""

KEY = "environment.env_vars"
"""Configuration key in messages about environment variables."""


@frozen(kw_only=True)
class EnvironmentSpec:
    """The specification of one worker of a task's environment."""

    task: str
    """Name of the task, which is set on its prompts."""
    env: str
    """Name of the environment, as in ``math:sort``."""
    options: Mapping[str, Any] = field(factory=dict)
    """Options of the environment's factory."""
    config: EnvironmentConfig = field(factory=EnvironmentConfig)
    log: Path | None = None
    """File for the environment's output."""


class EnvironmentProcess:
    """An ``EnvironmentClient`` whose environment lives in a killable child process without CUDA.

    Every method but ``aclose`` starts the process if needed.

    Args:
        spec: the environment.
        plugins: selection of the plugins to load in its process.
        host: the plugins of this process; the environment then runs on a thread here (``ThreadChild``).
    """

    about = Description()

    def __init__(
        self,
        spec: EnvironmentSpec,
        *,
        plugins: PluginSelection = ALL_PLUGINS,
        host: PluginHost | None = None,
    ) -> None:
        self.spec = spec
        self.player: Player | None = None
        self.starts = 0
        self._made_with: dict[str, Any] = {
            "task": spec.task,
            "spec": spec.env,
            "options": dict(spec.options),
            "plugins": evolve(plugins, elsewhere=bool(spec.config.python)),
            "concurrency": spec.config.concurrency,
            "deadline": spec.config.deadline,
        }
        self._host = host
        self._child: Child | None = None
        self._closed = False
        self._starting = asyncio.Lock()
        self._slots = FairSemaphore(1)
        self._playing = 0
        """Number of rollouts that its agent plays."""
        self._probe: asyncio.Task[None] | None = None
        self._dead: Child | None = None
        """The last process that was found dead."""
        self._was_alone = False
        """Whether it died while only one call was running."""
        self._closing: list[str] = []
        self._closer: asyncio.Task[None] | None = None
        self._name = f"environment of task {spec.task!r}"
        self._services = Services(self._name, None)
        self._dispatcher = Dispatcher(self, self._name)
        """The queue of those who have no pool: they wait for no service."""

    async def start(self) -> None:
        """Make the environment.  Raises PluginError or ConfigError if that fails."""
        await self._started()

    async def prompts(self, split: str) -> list[Prompt]:
        """Return the prompts of ``"train"`` or ``"validation"``, each with an id and the task's name."""
        return self._unpickled(await self._call("prompts", split), f"prompts({split!r})")

    async def convert(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt] | None:
        """Return the prompts of rows, or None if the environment does not make them."""
        pickled = await self._call("convert", list(rows))
        return None if pickled is None else self._unpickled(pickled, "prompt")

    async def solve(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """Return a reply with a full reward for each prompt, or None if unknown."""
        replies: list[str | None] = await self._call("solve", list(prompts))
        return replies

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        """Open a session for each prompt, or report why not; without sessions, return only the tools."""
        await self._started()
        if not self.about.has_sessions:
            return [SessionStart(tools=self.about.tools)] * len(prompts)
        return await self._dispatcher.ask(self._services.openings(prompts.items(), self.about.slots))

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Judgement]:
        """Return feedback for each episode, in order; a failed one has an error and no reward.

        Raises PluginError if results have the wrong number or type.
        """
        await self._started()
        some = self._services.evaluations(episodes, self.about)
        return await self._dispatcher.ask(some)

    async def call(self, method: str, items: Sequence[Any], slots: int) -> Any | Failure:
        """Make a call "evaluate", "open" or "run"; it takes ``slots``, or all if there are fewer.

        Raises PluginError if the environment cannot be made or breaks its contract, ChildDied if it is
        closed.
        """
        async with self._slots.take(slots) if slots else contextlib.nullcontext():
            child = await self._started()
            seconds = None if method == "run" else self.about.deadline
            try:
                results = await child.call_alongside(method, items, seconds=seconds, grace=self.about.grace)
            except PluginError:
                raise
            except Exception as error:
                if self._closed:
                    raise
                return self._failure(child, error, slots)
        if method == "evaluate" and (lost := sum(each.lost for each in results)):
            report("session_lost", self._name, f"{lost} sessions ended with the process that held them")
        return results

    async def run(self, session: str, prompt: Prompt, client: AgentClient) -> Judgement | None:
        """Let the agent play a rollout; None if ``evaluate`` judges it.

        The caller keeps to the number of ``agents``.  If the process dies, all rollouts that it plays are
        lost.  Raises PluginError for a result of the wrong type.
        """
        child = await self._started()
        self._playing += 1
        try:
            found: Judgement | Failure | None = await self.call("run", (session, prompt, client), 0)
        except asyncio.CancelledError:
            self._look_after(child)
            raise
        finally:
            self._playing -= 1
        if not isinstance(found, Failure):
            return found
        error, fault = found.cause, fault_of(found.cause)
        away = error if isinstance(error, Unavailable) and not error.timed_out else None
        if away is None and not found.died:
            report("call_failed", self._name, found.brief, fault=fault)
        lost = found.died and not found.alone
        return Judgement(error=describe(error), fault=fault, lost=lost, unavailable=away)

    async def close(self, sessions: Sequence[str]) -> None:
        """Close sessions as soon as the process is free, at the latest in ``aclose``."""
        if self.about.has_sessions:
            self._closing += sessions
            if self._closer is None:
                self._closer = asyncio.create_task(self._close_soon(), name=f"closing of {self.about.who}")

    async def aclose(self) -> None:
        """Close the open sessions and end the process; waiting calls raise ChildDied."""
        self._closed = True
        await self._end()
        if tasks := [task for task in (self._closer, self._probe) if task is not None]:
            await asyncio.wait(tasks)

    def _unpickled(self, pickled: bytes, method: str) -> list[Prompt]:
        try:
            prompts: list[Prompt] = pickle.loads(pickled)
        except Exception as error:
            raise PluginError(f"{self.about.who}: {method}: {UNREADABLE}: {describe(error)}") from error
        return prompts

    async def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            if (self.about.has_sessions or self.about.has_aclose) and child.alive:
                with contextlib.suppress(GrpoError):
                    await child.call("end", seconds=CLOSING)
            await child.aclose()

    async def _close_soon(self) -> None:
        async with self._slots.take():
            while self._closing:
                sessions, self._closing = self._closing, []
                if self._child is not None and self._child.alive:
                    with contextlib.suppress(GrpoError):  # it died, and its sessions with it
                        await self._child.call_alongside(
                            "close", sessions, seconds=self.about.deadline, grace=self.about.grace
                        )
            self._closer = None

    def _look_after(self, child: Child) -> None:
        """Kill the process soon if a cancelled agent blocks the others."""

        async def probe() -> None:
            with contextlib.suppress(GrpoError):
                await child.call("ping", seconds=CLOSING + GRACE)

        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(probe(), name=f"probe of {self.about.who}")

    def _failure(self, child: Child, error: Exception, slots: int) -> Failure:
        """Describe a failure."""
        died = error is child.death
        if died:
            agents = self._playing - (slots == 0)
            self._bury(child, error, alone=self._slots.used == slots and not agents)
        return Failure(error, self._brief(error), died=died, alone=died and self._was_alone)

    def _bury(self, child: Child, why: Exception, *, alone: bool) -> None:
        """Report the death of a child once, at the first call that notices it."""
        if child is not self._dead:
            self._dead, self._was_alone = child, alone
            cause: Literal["deadline", "died"] = "deadline" if isinstance(why, DeadlineExceeded) else "died"
            report(cause, self._name, f"{self._brief(why)}; it is started again")

    def _brief(self, error: Exception) -> str:
        """Summarise in one line what happened to the environment."""
        line = describe(error).partition("\n")[0].partition("; the end of ")[0]
        return line.removeprefix(self._name).removeprefix(":").strip()[:300]

    async def _call(self, method: str, argument: Any) -> Any:
        async def ask() -> Any:
            child = await self._started()
            try:
                return await child.call(method, argument, seconds=self.spec.config.start_deadline)
            except ChildDied as error:
                self._failure(child, error, self._slots.number)
                raise

        await self._started()
        async with self._slots.take(self._slots.number):
            return await repeated(ask, MAX_DEATHS, ChildDied)

    async def _started(self) -> Child:
        """Return the running child, or start one.  Raises PluginError if the environment cannot be made."""
        if self._child is not None and self._child.alive:
            return self._child
        async with self._starting:
            if self._child is not None and self._child.alive:
                return self._child
            if self._closed:
                raise ChildDied(f"the {self._name} is closed")
            if self._child is not None:  # it died between two calls
                why = self._child.death or ChildDied("it died while nobody waited for it")
                self._bury(self._child, why, alone=False)
            await self._end()
            try:
                return await repeated(self._start, MAX_DEATHS, ChildDied)
            except ChildDied as error:
                raise self._cannot_start(error) from error

    def _cannot_start(self, error: GrpoError) -> PluginError:
        return PluginError(f"task {self.spec.task!r}: the environment cannot be started: {error}")

    async def _start(self) -> Child:
        """Start a child.  Raises ChildDied, PluginError, ConfigError."""
        self.starts += 1
        python = self.spec.config.python
        interpreter = await asyncio.to_thread(Interpreter.find, python) if python else None
        given = from_here(self.spec.config.env_vars, KEY)
        child: Child
        if self._host is not None:
            make = partial(made, **self._made_with, host=self._host)
            child = ThreadChild(make, name=self._name)
        else:
            child = Child(
                "grpo_core.environments.host:made",
                self._made_with,
                name=self._name,
                # with the same hashes in each process, a set of strings has the same order
                environ={"CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0", **given},
                mask=Mask({**secrets.mask().values, **variables_of(self.spec.config.env_vars, KEY)}),
                log=self.spec.log,
                interpreter=interpreter,
            )
        try:
            description: Description = await child.started(seconds=self.spec.config.start_deadline)
        except BaseException as error:
            await child.aclose(seconds=0)
            if isinstance(error, DeadlineExceeded):
                raise self._cannot_start(error) from error
            if interpreter and isinstance(error, SelectionError):
                raise SelectionError(f"in {interpreter.path}: {error}") from error
            raise
        self._child, self.about = child, description
        if self._slots.number != (number := max(1, description.concurrency)):
            self._slots = FairSemaphore(number)
        return child
