"""An environment as a run uses it, without a process: for tests of environments and of the core."""

from __future__ import annotations

import asyncio
import contextvars
import pickle
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from grpo_core.contracts.errors import PluginError, fault_of, with_place
from grpo_core.contracts.incidents import report
from grpo_core.contracts.playing import Player
from grpo_core.contracts.records import AgentClient, Episode, Judgement, Prompt, SessionStart
from grpo_core.environments.host import EnvironmentHost, units

T = TypeVar("T")

_INTERRUPTED = 0.1
"""Seconds after which a cancelled call that still runs is cancelled again."""


def finished(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that never waits, such as the methods of ``HostedEnvironment``.

    Needs no event loop.  Raises RuntimeError if the coroutine waits for something.
    """
    try:
        coroutine.send(None)
    except StopIteration as end:
        result: T = end.value
        return result
    coroutine.close()
    raise RuntimeError(f"{coroutine!r} waits; run it in an event loop")


class HostedEnvironment:
    """An environment of this process, behind the interface that the rollout code calls.

    As in a run, a batch that raises is evaluated again in its parts, and the episodes that still raise are
    unscored with an error; results of the wrong number or type raise PluginError.  No method ever waits, so
    ``finished`` can run it without an event loop; an environment with async methods needs that, since it runs
    in its own event loop.

    The code of an environment with ``async def run`` runs in a thread, one call after another: its agent
    calls the model, which the caller's event loop serves.
    """

    def __init__(self, environment: Any, *, task: str = "task") -> None:
        self.host = EnvironmentHost(environment, task=task)
        self.about = self.host.description()
        self.player: Player | None = None
        self.calls: list[int] = []
        """Number of episodes in each call of ``evaluate``."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="agents") if self.about.runs_agents else None

    async def start(self) -> None:
        """Do nothing: the environment exists already."""

    async def prompts(self, split: str) -> list[Prompt]:
        """The prompts of ``"train"`` or ``"validation"``; each has an id and the task's name."""
        prompts: list[Prompt] = pickle.loads(self.host.prompts(split))
        return prompts

    async def convert(self, rows: Sequence[Mapping[str, Any]]) -> list[Prompt] | None:
        """The prompts of rows, or None if the environment does not make them."""
        pickled = self.host.call("convert", rows)
        return None if pickled is None else list(pickle.loads(pickled))

    async def solve(self, prompts: Sequence[Prompt]) -> list[str | None]:
        """Return for each prompt a reply with the full reward, if the environment knows one."""
        return self.host.solve(prompts)

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        """Begin a session for each prompt, in order; its key is the session's name."""
        if not self.about.has_sessions:
            return [SessionStart(tools=self.about.tools)] * len(prompts)
        return await self._called(lambda: self.host.call("open", list(prompts.items())))

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Judgement]:
        """Feedback for each episode, in order."""
        self.calls.append(len(episodes))
        whole = self.about.slots != "all"
        parts = [episodes] if whole else units(episodes, whole_groups=self.about.needs_group)
        return await self._called(lambda: [feedback for part in parts for feedback in self._evaluate(part)])

    async def call(self, method: str, items: Sequence[Any], slots: int) -> Sequence[Any]:
        """Feedback for episodes, or sessions for pairs."""
        return await (self.evaluate(items) if method == "evaluate" else self.open(dict(items)))

    def _evaluate(self, episodes: Sequence[Episode]) -> list[Judgement]:
        try:
            found: list[Judgement] = self.host.call("evaluate", episodes)
            return found
        except PluginError:
            raise
        except Exception as error:
            failure, fault = with_place(error), fault_of(error)
        parts = units(episodes, whole_groups=self.about.needs_group)
        if len(parts) == 1:
            return [Judgement(error=failure, fault=fault)] * len(episodes)
        feedback = [each for part in parts for each in self._evaluate(part)]
        if all(each.error is None for each in feedback):
            each = "group" if self.about.needs_group else "episode"
            report(
                "batch_failed",
                self.about.who,
                f"a call with {len(episodes)} episodes failed ({failure}), and {len(parts)} calls with one "
                f"{each} each succeeded; correct evaluate for batches",
                fault=fault,
            )
        return feedback

    async def run(self, session: str, prompt: Prompt, client: AgentClient) -> Judgement | None:
        """Let the agent play a rollout; None if ``evaluate`` judges it.

        Cancelling this cancels the agent.
        """
        try:
            return await self._called(lambda: self.host.call("run", (session, prompt, client)))
        except PluginError:
            raise
        except Exception as error:
            return Judgement(error=with_place(error), fault=fault_of(error))

    async def close(self, sessions: Sequence[str]) -> None:
        """End these sessions."""
        await self._called(lambda: self.host.call("close", sessions))

    async def aclose(self) -> None:
        """End all sessions."""
        await self._called(self.host.end)
        if self._thread is not None:
            self._thread.shutdown()

    async def _called(self, work: Callable[[], T]) -> T:
        """Run the environment's code, in its thread if it has one."""
        if self._thread is None:
            return work()
        work_there = self._thread.submit(contextvars.copy_context().run, work)
        call = asyncio.wrap_future(work_there)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            while not work_there.cancel() and not call.done():
                self.host.interrupt()
                await asyncio.wait([call], timeout=_INTERRUPTED)
            raise
