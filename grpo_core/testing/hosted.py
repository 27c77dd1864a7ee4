"""An environment as the core uses it, without a process: for tests of environments and of the core."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from grpo_core.environments.host import EnvironmentHost
from grpo_core.records import Episode, Feedback, Prompt, SessionStart


class HostedEnvironment:
    """An ``EnvironmentClient`` around an environment of this process; what the environment raises is raised.

    An environment whose methods are async needs a thread without a running event loop.
    """

    def __init__(self, environment: Any, *, task: str = "task") -> None:
        self.host = EnvironmentHost.around(environment, task=task)
        self._description = self.host.description()
        self.max_turns: int = self._description["max_turns"]
        self.needs_group: bool = self._description["needs_group"]
        self.calls: list[int] = []
        """Episodes in each call of ``evaluate``."""

    async def open(self, prompts: Mapping[str, Prompt]) -> list[SessionStart]:
        if not self._description["sessions"]:
            return [SessionStart(tools=self._description["tools"])] * len(prompts)
        return self.host.open(list(prompts.items()))

    async def evaluate(self, episodes: Sequence[Episode]) -> list[Feedback]:
        self.calls.append(len(episodes))
        return self.host.evaluate(episodes)

    async def close(self, sessions: Sequence[str]) -> None:
        self.host.close(sessions)

    async def aclose(self) -> None:
        self.host.end()
