"""The workers of one environment that act as one; episodes go to the least loaded worker.

    EnvironmentPool   --- one call with the episodes of many rollouts --->   EnvironmentProcess (a worker)

Each worker has its own batcher; calls that run in slots of the environment are not merged.  The rollouts of a
group go to one worker, and rollouts with a session go to the worker that opened it.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import field, frozen

from grpo_core.config import EnvironmentConfig
from grpo_core.environments.batcher import MicroBatcher
from grpo_core.environments.host import Slotted, in_slots
from grpo_core.playing import Player
from grpo_core.protocols import EnvironmentClient
from grpo_core.records import AgentClient, Episode, Feedback, Prompt, SessionStart


@frozen(kw_only=True)
class EnvironmentSpec:
    """The specification of one worker of a task's environment, which is sent to where it runs."""

    task: str
    env: str
    """Name of the environment, as in ``math:sort``."""
    options: Mapping[str, Any] = field(factory=dict)
    config: EnvironmentConfig = field(factory=EnvironmentConfig)
    log: Path | None = None
    """File for the environment's output."""


class EnvironmentWorker(EnvironmentClient, Protocol):
    """One environment in a process or a cluster worker."""

    @property
    def slots(self) -> Slotted:
        """The calls that run in slots, one episode each; the others are worth merging."""

    @property
    def runs_agents(self) -> bool:
        """Whether its agents play their rollouts by themselves."""

    @property
    def first_traceback(self) -> str: ...

    async def start(self) -> None: ...
    async def prompts(self, split: str) -> list[Prompt]: ...
    async def from_source(self, prompts: Sequence[Prompt]) -> list[Prompt] | None: ...
    async def solve(self, prompts: Sequence[Prompt]) -> list[str | None]: ...
    async def aclose(self) -> None: ...


class EnvironmentPool:
    """Workers behind the ``EnvironmentWorker`` protocol, with batched ``evaluate``.

    Args:
        workers: at least one worker; all have the same environment.
        config: how calls are batched.
        success: reward of a success, instead of what the environment declares.
    """

    def __init__(
        self,
        workers: Sequence[EnvironmentWorker],
        config: EnvironmentConfig,
        *,
        success: float | None = None,
    ) -> None:
        self._workers = list(workers)
        self._batchers = [
            MicroBatcher[Episode, Feedback](
                worker.evaluate, max_batch=config.max_batch, max_wait=config.max_wait
            )
            for worker in self._workers
        ]
        self._load = [0] * len(self._workers)
        """Number of running episodes and open sessions of each worker."""
        self._homes: dict[str, int] = {}
        """The worker of each session."""
        self._success = success
        self._describe()
        self.player: Player | None = None
        """Set by the owner before the first rollout."""

    @property
    def runs_agents(self) -> bool:
        """Whether its agents play their rollouts by themselves; known once it has started."""
        return self._workers[0].runs_agents

    @property
    def first_traceback(self) -> str:
        return next((w.first_traceback for w in self._workers if w.first_traceback), "")

    async def start(self) -> None:
        """Start all workers together.  Raises the first error."""
        await asyncio.gather(*(worker.start() for worker in self._workers))
        self._describe()

    def _describe(self) -> None:
        """Take over what the environment declares, which is known once it has started."""
        first = self._workers[0]
        self.max_turns, self.needs_group = first.max_turns, first.needs_group
        self.success = first.success if self._success is None else self._success
        for batcher in self._batchers:
            batcher.together = self.needs_group

    async def prompts(self, split: str) -> list[Prompt]:
        return await self._workers[0].prompts(split)

    async def from_source(self, prompts: Sequence[Prompt]) -> list[Prompt] | None:
        return await self._workers[0].from_source(prompts)

    async def solve(self, prompts: Sequence[Prompt]) -> list[str | None]:
        return await self._workers[0].solve(prompts)

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        """Open sessions; the sessions of one prompt are opened by one worker."""
        by_prompt: dict[str, list[str]] = defaultdict(list)
        for session, prompt in prompts.items():
            by_prompt[prompt.id].append(session)
        shares: dict[int, list[str]] = defaultdict(list)
        for sessions in by_prompt.values():
            worker = self._least()
            shares[worker] += sessions
            self._load[worker] += len(sessions)
            self._homes |= dict.fromkeys(sessions, worker)
        opened: dict[str, SessionStart] = {}

        async def ask(worker: int, sessions: list[str]) -> None:
            answer = await self._workers[worker].open({session: prompts[session] for session in sessions})
            opened.update(zip(sessions, answer, strict=True))

        await asyncio.gather(*(ask(*share) for share in shares.items()))
        return [opened[session] for session in prompts]

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Feedback]:
        """Return feedback for each episode, in order."""
        if len(self._workers) == 1:
            return await self._call(0, episodes)
        by_group: dict[str, list[int]] = defaultdict(list)
        for place, episode in enumerate(episodes):
            by_group[episode.group].append(place)
        shares: dict[int, list[int]] = defaultdict(list)
        for places in by_group.values():
            homes = (self._homes.get(str(episodes[place].session)) for place in places)
            worker = next((home for home in homes if home is not None), None)
            worker = self._least() if worker is None else worker
            shares[worker] += places
            self._load[worker] += len(places)
        feedback: dict[int, Feedback] = {}

        async def ask(worker: int, places: list[int]) -> None:
            try:
                answer = await self._call(worker, [episodes[place] for place in places])
                feedback.update(zip(places, answer, strict=True))
            finally:
                self._load[worker] -= len(places)

        await asyncio.gather(*(ask(*share) for share in shares.items()))
        return [feedback[place] for place in range(len(episodes))]

    def _call(self, worker: int, episodes: Sequence[Episode]) -> Awaitable[list[Feedback]]:
        """Let a worker evaluate: together with episodes of others, unless these run in slots."""
        if in_slots(self._workers[worker].slots, episodes):
            return self._workers[worker].evaluate(episodes)
        return self._batchers[worker].submit(episodes)

    async def run(self, session: str, prompt: Prompt, client: AgentClient) -> Feedback | None:
        """Let the agent play a rollout; None if ``evaluate`` judges it."""
        home = self._homes.get(session)
        worker = self._least() if home is None else home
        self._load[worker] += 1
        try:
            return await self._workers[worker].run(session, prompt, client)
        finally:
            self._load[worker] -= 1

    async def close(self, sessions: Sequence[str]) -> None:
        shares: dict[int, list[str]] = defaultdict(list)
        for session in sessions:
            if (worker := self._homes.pop(session, None)) is not None:
                shares[worker].append(session)
                self._load[worker] -= 1
        for worker, some in shares.items():
            await self._workers[worker].close(some)

    async def aclose(self) -> None:
        """End all workers; calls that wait for them raise an error."""
        await asyncio.gather(*(batcher.aclose() for batcher in self._batchers))
        await asyncio.gather(*(worker.aclose() for worker in self._workers))

    def _least(self) -> int:
        return min(range(len(self._workers)), key=self._load.__getitem__)
