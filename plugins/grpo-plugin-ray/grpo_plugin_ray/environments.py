"""An environment in a Ray worker, which runs the same child process as the driver's machine would."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve, frozen

from grpo_core import (
    AgentClient,
    ChildDied,
    Episode,
    PluginError,
    Prompt,
)
from grpo_core.contracts.records import SessionStart
from grpo_core.kit import EnvironmentProcess, EnvironmentSpec, Judgement, report, reported_to
from grpo_plugin_ray.cluster import Incidents, PluginRequirement, answer_of, call, load, report_again, where

MAX_DEATHS = 3
"""Number of consecutive deaths of workers without an answer after which the environment is given up."""


@frozen(kw_only=True)
class EnvironmentSetup:
    """Everything that a worker needs to create its environment; plain data.

    Attributes:
        variables: values of the environment variables in ``spec.config.env_vars``.
    """

    spec: EnvironmentSpec
    origin: PluginRequirement
    variables: Mapping[str, str]


class RemoteEnvironment:
    """The actor.  Plugin code runs in its child process, which is killed and restarted as usual."""

    def __init__(self, name: str, made_from: EnvironmentSetup) -> None:
        self._who = f"{name} ({where()})"
        os.environ.update(made_from.variables)
        self._made_from = made_from
        self._incidents: Incidents = []
        """Incidents since the last answer."""
        self._process = EnvironmentProcess(made_from.spec, plugins=made_from.origin.plugins)

    async def start(self) -> Any:
        self._made_from.origin.check(self._who)
        if (log := self._made_from.spec.log) is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
        with reported_to(self._incidents.append):
            await self._process.start()
        return evolve(self._process.about, who=self._who)

    async def ask(self, method: str, *args: Any) -> tuple[Any, Incidents]:
        """Call a method of ``EnvironmentProcess``; return its result and the incidents since the last one."""
        with reported_to(self._incidents.append):
            answer = await getattr(self._process, method)(*args)
        incidents, self._incidents[:] = [*self._incidents], []
        return answer, incidents


class RayEnvironment:
    """An ``EnvironmentWorker`` in a Ray worker.  A dead worker is replaced, and calls are retried.

    Args:
        name: name in messages ("environment sort 0").
        made_from: setup of the worker's environment.
        resources: options of the Ray actor.
    """

    about = EnvironmentProcess.about

    def __init__(self, name: str, made_from: EnvironmentSetup, *, resources: Mapping[str, Any]) -> None:
        self.player: Any = None
        self._name, self._made_from, self._resources = name, made_from, resources
        self._who = name
        self._worker: Any = None
        self._dead: Any = None
        """The worker that died last."""
        self._starting = asyncio.Lock()
        self._deaths = 0

    async def start(self) -> None:
        """Start the worker.  Raises PluginError and ConfigError like the environment."""
        await self._started()

    async def prompts(self, split: str) -> list[Prompt]:
        prompts: list[Prompt] = await self._ask("prompts", split)
        return prompts

    async def convert(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt] | None:
        made: list[Prompt] | None = await self._ask("convert", list(rows))
        return made

    async def solve(self, prompts: Sequence[Prompt]) -> list[str | None]:
        replies: list[str | None] = await self._ask("solve", list(prompts))
        return replies

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        opened: list[SessionStart] = await self._ask("open", dict(prompts))
        return opened

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Judgement]:
        feedback: list[Judgement] = await self._ask("evaluate", list(episodes))
        return feedback

    async def call(self, method: str, items: Sequence[Any], slots: int) -> Sequence[Any]:
        """Evaluate episodes, or open sessions; the worker's process tries them again alone."""
        return await (self.evaluate(items) if method == "evaluate" else self.open(dict(items)))

    async def run(self, session: str, prompt: Prompt, client: AgentClient) -> Judgement | None:
        """Run the agent in the worker; cancelling this cancels the agent.

        If the worker dies, all its running rollouts are lost.
        """
        worker = await self._started()
        reference = worker.ask.remote("run", session, prompt, client)
        try:
            answer = await answer_of(reference, who=self._who)
        except asyncio.CancelledError:
            load().cancel(reference)
            raise
        except ChildDied as error:
            self._died(worker, error)
            return Judgement(error=str(error), lost=True)
        feedback: Judgement | None = self._unpacked(answer)
        return feedback

    async def close(self, sessions: Sequence[str]) -> None:
        await self._ask("close", list(sessions))

    async def aclose(self) -> None:
        """Close the open sessions, and end the worker."""
        worker, self._worker = self._worker, None
        if worker is not None:
            try:
                await call(worker, "ask", "aclose", who=self._who)
            except ChildDied:
                return
            finally:
                load().kill(worker)

    async def _ask(self, method: str, *args: Any) -> Any:
        while True:
            worker = await self._started()
            try:
                answer = await call(worker, "ask", method, *args, who=self._who)
            except ChildDied as error:
                self._died(worker, error)
            else:
                return self._unpacked(answer)

    def _unpacked(self, answer: tuple[Any, Incidents]) -> Any:
        """Return the result in a worker's answer, and report its incidents."""
        result, incidents = answer
        self._deaths = 0
        report_again(incidents, self._name, self._who)
        return result

    async def _started(self) -> Any:
        """Return the worker, or a replacement."""
        async with self._starting:
            while self._worker is None:
                actor: Any = load().remote(RemoteEnvironment)
                worker = actor.options(max_restarts=0, **self._resources).remote(self._name, self._made_from)
                limit = self._made_from.spec.config.start_deadline
                try:
                    async with asyncio.timeout(limit):
                        started = await call(worker, "start", who=self._name)
                except ChildDied as error:
                    self._died(worker, error)
                    continue
                except BaseException as error:
                    load().kill(worker)
                    if not isinstance(error, TimeoutError):
                        raise
                    raise PluginError(
                        f"{self._name}: not started within {limit:g} s; it "
                        f"needs {dict(self._resources)}, the cluster has {load().available_resources()} "
                        "free (environment.start_deadline)"
                    ) from error
                self._worker, self.about, self._who = worker, started, started.who
            return self._worker

    def _died(self, worker: Any, error: ChildDied) -> None:
        """Count a death once for all calls that report it.  Raises PluginError after too many deaths."""
        first, self._dead = worker is not self._dead, worker
        if first:
            self._worker = None
            self._deaths += 1
        if self._deaths >= MAX_DEATHS:
            raise PluginError(f"{self._name}: {self._deaths} workers died in a row; the last: {error}")
        if first:
            report("died", self._name, f"its worker is replaced: {error}")
