"""TRL's environment classes (``environment_factory``): ``reset``, public methods as tools, ``get_reward``."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

import grpo_core as grpo
from grpo_plugin_trl.rewards import Call, RewardFunction, called, combined, named, row_of

OWN = ("reset", "get_reward")
"""Methods that are not tools."""


class TRLEnvironment(grpo.Environment):
    """An environment class of TRL; each rollout has one instance.

    TRL appends the result of ``reset`` to the prompt.  Here prompts are created before rollouts, so ``reset``
    is called once to create each prompt, and again for each rollout.  It must be deterministic for a row.
    """

    def __init__(
        self,
        name: str,
        factory: Callable[[], Any],
        functions: Sequence[RewardFunction],
        *,
        conversational: bool,
        answer: str,
        max_turns: int,
    ) -> None:
        self._name, self._factory = name, factory
        self._conversational, self._answer = conversational, answer
        self._columns: dict[str, None] = {}
        self._session = _session_class(probe := factory(), name)
        self.max_turns = max_turns if _tools(type(probe)) else 1
        own = getattr(probe, "get_reward", None)
        self._functions = named([*functions, *([_own_reward(type(probe))] if own else [])])
        if not self._functions:
            raise grpo.ConfigError(
                f"trl: {name} has no method get_reward, and no reward functions are named: set more"
            )

    def prompts(self, split: str) -> Sequence[grpo.Prompt]:
        raise grpo.ConfigError(
            f"trl: the rows for {self._name}'s reset come from the task's data; name it with "
            "tasks.NAME.data (and validation_data, or validation.every = 0)"
        )

    def prompt(self, row: Mapping[str, Any]) -> grpo.Prompt:
        """Append the result of ``reset`` for the row to the last message."""
        prompt = super().prompt(row)
        given = [dict(message) for message in prompt.messages]
        row = {"prompt": given, **row_of(prompt, self._answer)}
        observation = self._reset(self._factory(), row)
        last = {**given[-1], "content": f"{given[-1].get('content') or ''}{observation or ''}"}
        return attrs.evolve(
            prompt, messages=(*given[:-1], last), info={"row": row, "observation": observation}
        )

    def solve(self, prompt: grpo.Prompt) -> str | None:
        return None

    def open(self, prompt: grpo.Prompt) -> Any:
        environment, before = self._factory(), prompt.info["observation"]
        observation = self._reset(environment, prompt.info["row"])
        if observation != before:
            raise grpo.PluginError(
                f"trl: {self._name}.reset returned {observation!r:.100} for a row for which it returned "
                f"{before!r:.100} before: it must be the same for the same row"
            )
        return self._session(environment)

    async def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        environments = [episode.session._environment for episode in episodes]
        call = Call.of(
            [_as_row(episode) for episode in episodes],
            conversational=self._conversational,
            answer=self._answer,
            columns=self._columns,
            environments=environments,
        )
        return combined(self._functions, await called(self._functions, call), call)

    def _reset(self, environment: Any, row: Mapping[str, Any]) -> str | None:
        observation = environment.reset(**copy.deepcopy(dict(row)))
        if observation is not None and not isinstance(observation, str):
            raise grpo.PluginError(
                f"trl: {self._name}.reset returned {type(observation).__name__}; expected text or None "
                "(blocks with images are not supported)"
            )
        return observation


def _as_row(episode: grpo.Episode) -> grpo.Episode:
    """Return the episode with the columns of its row, as for reward functions without an environment."""
    row = {key: value for key, value in episode.prompt.info["row"].items() if key != "prompt"}
    return attrs.evolve(episode, prompt=attrs.evolve(episode.prompt, answer=None, info=row))


def _tools(kind: type) -> list[str]:
    return [
        name
        for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)
        if not name.startswith("_") and name not in OWN
    ]


def _session_class(probe: Any, name: str) -> type:
    """Create the class of sessions, whose public methods are the environment's tools."""
    kind = type(probe)
    if not callable(getattr(kind, "reset", None)):
        raise grpo.ConfigError(f"trl: {name} makes {kind.__name__}, which has no method reset")

    def start(self: Any, environment: Any) -> None:
        self._environment = environment

    def tool(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return method(self._environment, *args, **kwargs)

        return forward

    methods = {tool_name: tool(getattr(kind, tool_name)) for tool_name in _tools(kind)}
    return type(kind.__name__, (), {"__init__": start, **methods})


def _own_reward(kind: type) -> RewardFunction:
    async def get_reward(environments: Sequence[Any], **_: Any) -> list[float | None]:
        rewards = [environment.get_reward() for environment in environments]
        return [await reward if inspect.isawaitable(reward) else reward for reward in rewards]

    return RewardFunction(kind.__name__, get_reward)
