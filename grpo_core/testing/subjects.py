"""An environment under test, as ``grpo_core.testing.conformance`` sees it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from grpo_core.environments.host import EnvironmentHost, units
from grpo_core.errors import describe
from grpo_core.records import Episode, Feedback, Prompt, SessionStart


class EnvironmentUnderTest(Protocol):
    """An environment under test."""

    needs_group: bool
    max_turns: int

    def prompts(self, split: str) -> list[Prompt]: ...
    def solve(self, prompts: Sequence[Prompt]) -> list[str | None]: ...
    def open(self, prompts: Sequence[tuple[str, Prompt]]) -> list[SessionStart]: ...
    def evaluate(self, episodes: Sequence[Episode]) -> list[Feedback]: ...
    def close(self, sessions: Sequence[str]) -> None: ...

    def restart(self) -> None:
        """Make it anew."""
        ...


class EnvironmentInProcess:
    """An ``EnvironmentUnderTest`` in this process.

    Args:
        make: the environment, anew each time; a class will do.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.restart()

    def restart(self) -> None:
        self._host = EnvironmentHost.around(self._make())
        description = self._host.description()
        self.needs_group = bool(description["needs_group"])
        self.max_turns = int(description["max_turns"])
        self._sessions, self._tools = bool(description["sessions"]), description["tools"]

    def prompts(self, split: str) -> list[Prompt]:
        prompts: list[Prompt] = pickle.loads(self._host.prompts(split))
        return prompts

    def solve(self, prompts: Sequence[Prompt]) -> list[str | None]:
        return self._host.solve(prompts)

    def open(self, prompts: Sequence[tuple[str, Prompt]]) -> list[SessionStart]:
        return (
            self._host.open(prompts) if self._sessions else [SessionStart(tools=self._tools)] * len(prompts)
        )

    def evaluate(self, episodes: Sequence[Episode]) -> list[Feedback]:
        """A batch that raises is evaluated again in its parts, as in a run."""
        try:
            return self._host.evaluate(episodes)
        except Exception as error:
            parts = units(episodes, whole_groups=self.needs_group)
            if len(parts) == 1:
                return [Feedback(error=describe(error))] * len(episodes)
        return [feedback for part in parts for feedback in self.evaluate(part)]

    def close(self, sessions: Sequence[str]) -> None:
        self._host.close(sessions)
