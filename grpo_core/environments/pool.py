"""A pool of workers of one environment; episodes go to the least loaded worker.

    EnvironmentPool   --- one call with the episodes of many rollouts --->   EnvironmentProcess (a worker)

Each worker has a queue (``Dispatcher``).  The rollouts of a group go to one worker, and rollouts with a
session go to the worker that opened it.  The rollouts of agents take places in the workers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

from attrs import evolve

from grpo_core.config import EnvironmentConfig
from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.contracts.playing import EnvironmentClient, Player
from grpo_core.contracts.records import AgentClient, Episode, Judgement, Prompt, SessionStart
from grpo_core.contracts.rewards import EVERY
from grpo_core.environments.dispatcher import Caller, Dispatcher, Services, Unit
from grpo_core.processes.aio import UNLIMITED, gather, not_counted


class Places:
    """Rollouts wait in order until a worker has a free place.  A further worker is used if all are busy.

    Args:
        workers: largest number of workers.
        each: number of rollouts that a worker plays at once.
        used: number of workers that are used from the start.
    """

    def __init__(self, workers: int, each: int, used: int = 1) -> None:
        self.each, self.used = each, used
        self._free = [each] * workers
        self._waiting: deque[tuple[int | None, asyncio.Future[int]]] = deque()

    @contextlib.asynccontextmanager
    async def take(self, home: int | None) -> AsyncIterator[int]:
        """Hold a place during the block, in the worker ``home`` if that is given; yields the worker.

        The wait for it does not count for the rollout's deadline.
        """
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((home, turn))
        self._admit()
        try:
            with not_counted():
                worker = await turn
            yield worker
        finally:
            if turn.done() and not turn.cancelled():
                self._free[turn.result()] += 1
            self._admit()

    def further(self, busy: int) -> int:
        """Return a worker that was not used so far, or ``busy`` if there is none."""
        if self.used == len(self._free):
            return busy
        self.used += 1
        return self.used - 1

    def _admit(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for home, turn in waiting:
            if turn.cancelled():
                continue
            worker = home if home is not None else max(range(self.used), key=self._free.__getitem__)
            if not self._free[worker] and home is None:
                worker = self.further(worker)
            if self._free[worker]:
                self._free[worker] -= 1
                turn.set_result(worker)
            else:
                self._waiting.append((home, turn))


ENOUGH = 64
"""Number of finished episodes after which a metric that none of them had counts as misspelled."""
NO_PARTS: Mapping[str, str] = MappingProxyType({})
UNAVAILABLE_FOR = "environment.unavailable_for"
"""Configuration key in messages about unavailable services."""


class EnvironmentWorker(EnvironmentClient, Caller, Protocol):
    """One environment in a process or a cluster worker."""

    async def start(self) -> None: ...
    async def prompts(self, split: str) -> list[Prompt]: ...
    async def convert(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt] | None: ...
    async def solve(self, prompts: Sequence[Prompt]) -> list[str | None]: ...
    async def aclose(self) -> None: ...


class EnvironmentPool:
    """Workers behind the ``EnvironmentWorker`` protocol, with batched ``evaluate``.

    Args:
        workers: at least one worker; all have the same environment.
        config: how calls are batched.
        for_agents: whether the further workers are for agents alone.
        on_demand: whether a further worker of an agent starts when the others are busy.
        name: name of the task, for messages.
        success: reward of a success, instead of what the environment declares.
        parts: metrics of which the reward is made, each with the key of the configuration that says so;
            ``EVERY`` is all of them.
    """

    def __init__(
        self,
        workers: Sequence[EnvironmentWorker],
        config: EnvironmentConfig,
        *,
        for_agents: bool = False,
        on_demand: bool = False,
        name: str = "task",
        success: float | None = None,
        parts: Mapping[str, str] = NO_PARTS,
    ) -> None:
        self._workers = list(workers)
        self._for_agents, self._on_demand = for_agents, on_demand
        self._places = Places(len(self._workers), UNLIMITED, len(self._workers))
        self._name = f"environment of task {name!r}"
        self._services = Services(self._name, config.unavailable_for, key=UNAVAILABLE_FOR)
        self._dispatchers = [
            Dispatcher(worker, self._name, max_batch=config.max_batch, max_wait=config.max_wait)
            for worker in self._workers
        ]
        self._load = [0] * len(self._workers)
        """Number of running episodes and open sessions of each worker."""
        self._homes: dict[str, int] = {}
        """The worker of each session."""
        self._success, self._parts = success, parts
        self._finished = 0
        """Number of episodes that ended with a reward while a metric of ``combine`` had not been seen."""
        self._unseen: set[str] = set()
        self._describe()
        self.player: Player | None = None
        """Set by the owner before the first rollout."""

    async def start(self) -> None:
        """Start all workers; of an agent the first, if others start on demand.  Raises the first error."""
        first = self._workers[0]
        await first.start()
        if self._for_agents and not first.about.agents:
            del self._workers[1:]
        used = 1 if first.about.agents and self._on_demand else len(self._workers)
        self._places = Places(len(self._workers), first.about.agents or UNLIMITED, used)
        await asyncio.gather(*(worker.start() for worker in self._workers[1:used]))
        self._describe()

    @property
    def remark(self) -> str:
        """The processes of an agent that plays one rollout in a process, and their memory; empty without."""
        if self.about.agents != 1:
            return ""
        return (
            f"{self._name}: its agent plays one rollout in a process; it starts processes of "
            f"{self.about.memory / 2**20:.0f} MiB as needed, at most {len(self._workers)} "
            "(environment.workers). `concurrency = 64` in the agent plays 64 in a process; grpo-core check "
            "says whether it can"
        )

    def _describe(self) -> None:
        """Copy the declarations of the started environment."""
        first = self._workers[0].about
        success = first.success if self._success is None else self._success
        self.about = evolve(first, success=success, combine=self._rules(first.combine))
        self._unseen = set(first.combine)

    def _rules(self, declared: Mapping[str, str]) -> dict[str, str]:
        """Return how metrics are combined.  Raises ConfigError if a part of the reward is not added."""
        for part, key in self._parts.items():
            for name, rule in declared.items():
                if part in (name, EVERY) and rule != "sum":
                    raise ConfigError(
                        f"{self._name}: {key} makes the reward of the metric {name!r}, which is added over "
                        f"the turns, and the environment declares combine = {{{name!r}: {rule!r}}}; declare "
                        "'sum', or give weights for other metrics"
                    )
        return {**declared, **dict.fromkeys(self._parts, "sum")}

    def check_combine(self) -> None:
        """Raise PluginError if ``combine`` names a metric that no finished episode had."""
        if self._finished and self._unseen:
            raise PluginError(
                f"{self._name}: combine names the metric {min(self._unseen)!r}, which none of "
                f"{self._finished} finished episodes has; correct the name, or give the metric in each "
                "episode, as 0.0 where there is nothing to count"
            )

    def _observe(self, feedback: Judgement | None) -> None:
        """Look for the metrics that ``combine`` names."""
        if not self._unseen or feedback is None:
            return
        self._unseen -= feedback.metrics.keys() | feedback.left_out.keys()
        self._finished += feedback.done and feedback.reward is not None
        if self._finished >= ENOUGH:
            self.check_combine()

    async def prompts(self, split: str) -> list[Prompt]:
        return await self._workers[0].prompts(split)

    async def convert(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt] | None:
        return await self._workers[0].convert(rows)

    async def solve(self, prompts: Sequence[Prompt]) -> list[str | None]:
        return await self._workers[0].solve(prompts)

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        """Open sessions; the sessions of one prompt are opened by one worker."""
        first = self._workers[0]
        if first.about.runs_agents and not first.about.has_sessions:  # each is played where a place is free
            return await first.open(prompts)
        together: dict[str, list[str]] = defaultdict(list)
        for session, prompt in prompts.items():
            own = first.about.runs_agents and not first.about.needs_group
            together[session if own else prompt.id].append(session)
        shares: dict[int, list[str]] = defaultdict(list)
        for sessions in together.values():
            worker = self._least()
            if self._load[worker] >= self._places.each:
                worker = self._places.further(worker)
            shares[worker] += sessions
            self._load[worker] += len(sessions)
            self._homes |= dict.fromkeys(sessions, worker)
        opened: dict[str, SessionStart] = {}

        async def ask(worker: int, sessions: list[str]) -> None:
            share = {session: prompts[session] for session in sessions}
            if first.about.has_sessions:
                begun = await self._dispatchers[worker].ask(
                    self._services.openings(share.items(), first.about.slots)
                )
            else:
                begun = await self._workers[worker].open(share)
            opened.update(zip(sessions, begun, strict=True))

        await gather(ask(*share) for share in shares.items())
        return [opened[session] for session in prompts]

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Judgement]:
        """Return feedback for each episode, in order."""
        some = self._services.evaluations(episodes, self.about)
        shares = self._shares(some)
        try:
            if len(shares) == 1:
                ((worker, share),) = shares.items()
                await self._dispatchers[worker].ask(share)
            else:
                await gather(self._dispatchers[worker].ask(share) for worker, share in shares.items())
        finally:
            for worker, share in shares.items():
                self._load[worker] -= sum(len(unit.items) for unit in share)
        feedback: list[Judgement] = [each for unit in some for each in unit.results]
        for place, (episode, each) in enumerate(zip(episodes, feedback, strict=True)):
            if each.unavailable is not None and each.messages:  # the answers of some of its tools
                rest = evolve(episode, messages=(*episode.messages, *each.messages))
                (answer,) = await self.evaluate([rest])
                feedback[place] = evolve(answer, messages=(*each.messages, *answer.messages))
            self._observe(feedback[place])
        return feedback

    def _shares(self, some: Sequence[Unit]) -> dict[int, list[Unit]]:
        """Return the units of each worker: its sessions, and whole groups."""
        shares: dict[int, list[Unit]] = defaultdict(list)
        workers: dict[str, int] = {}
        for unit in some:
            group = unit.items[0].group
            home = self._homes.get(str(unit.items[0].session))
            if group not in workers or home is not None:
                workers[group] = self._least() if home is None else home
            shares[workers[group]].append(unit)
            self._load[workers[group]] += len(unit.items)
        return shares

    async def run(self, session: str, prompt: Prompt, client: AgentClient) -> Judgement | None:
        """Let the agent play a rollout; None if ``evaluate`` judges it.

        If a service is unavailable, the feedback has its error, and the rollout is played again.
        """
        feedback, stands = await self._services["run"].once(
            prompt.id, lambda: self._run(session, prompt, client)
        )
        self._observe(feedback)
        return evolve(feedback, unavailable=None) if feedback is not None and stands else feedback

    async def _run(self, session: str, prompt: Prompt, client: AgentClient) -> Judgement | None:
        async with self._places.take(self._homes.get(session)) as worker:
            if session not in self._homes:  # it is judged where it was played
                self._homes[session] = worker
                self._load[worker] += 1
            with not_counted():
                await self._started(worker)
            return await self._workers[worker].run(session, prompt, client)

    async def _started(self, worker: int) -> None:
        """Start a worker of an agent unless it runs.  Raises PluginError."""
        try:
            await self._workers[worker].start()
        except PluginError as error:
            if not worker:
                raise
            raise PluginError(
                f"{error}; it is process {worker + 1} of its agent, and each makes the environment anew: "
                "environment.workers = 1 makes one"
            ) from error

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
        await asyncio.gather(*(dispatcher.aclose() for dispatcher in self._dispatchers))
        await asyncio.gather(*(worker.aclose() for worker in self._workers))

    def _least(self) -> int:
        return min(range(self._places.used), key=self._load.__getitem__)
