"""An environment around a plain function that returns the reward of a reply."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from math import fsum
from typing import Any

from attrs import evolve, frozen

from grpo_core.contracts.errors import ConfigError, PluginError
from grpo_core.contracts.protocols import Environment
from grpo_core.contracts.records import Episode, Feedback, Prompt

Reward = float | Feedback | None
AT_ONCE = 64
"""Number of calls of an async function that run at once."""
KNOWN: Mapping[str, Callable[[Episode], Any]] = {
    "reply": lambda episode: episode.reply,
    "answer": lambda episode: episode.prompt.answer,
    "prompt": lambda episode: episode.prompt,
    "messages": lambda episode: episode.messages,
    "info": lambda episode: episode.prompt.info,
    "episode": lambda episode: episode,
}
"""Values that a function can receive by the name of a parameter."""
TRL = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
"""Parameters of TRL's reward functions."""


class RewardFunction(Environment):
    """Judges replies with a function.

    Args:
        function: see ``grpo_core.train``.
        name: name of its task, for messages.

    Raises ConfigError for a function with a parameter that cannot be supplied.
    """

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        self._function = function
        self.judged_by = getattr(function, "__name__", name)
        """Name of the function, for errors."""
        self._arguments = Parameters.of(function, name)
        if isinstance(function, Added):
            self.combine = {name: "sum" for name, *_ in function.parts}

    def prompts(self, split: str) -> Sequence[Prompt]:
        return []

    def check(self, fields: Collection[str], what: str) -> None:
        """Raise PluginError if a parameter is not among the fields of a row."""
        check = self._function.check if isinstance(self._function, Added) else self._arguments.check
        check(fields, what)


class SyncRewardFunction(RewardFunction):
    """Judges replies one at a time."""

    def evaluate(self, episodes: Sequence[Episode]) -> Sequence[Reward]:
        return [self._function(**self._arguments(episode)) for episode in episodes]


class AsyncRewardFunction(RewardFunction):
    """Judges replies with an async function, several at a time."""

    concurrency = AT_ONCE

    async def score(self, episode: Episode) -> Reward:
        reward: Reward = await self._function(**self._arguments(episode))
        return reward


def environment_of(function: Callable[..., Any], name: str) -> RewardFunction:
    """Return the environment of a function, sync or async."""
    called = function if inspect.isroutine(function) else type(function).__call__
    kind = AsyncRewardFunction if inspect.iscoroutinefunction(called) else SyncRewardFunction
    return kind(function, name)


@frozen
class Added:
    """Adds the rewards of several functions; each is a metric."""

    parts: Sequence[tuple[str, Callable[..., Any], Parameters, float]]
    """Name, function, parameters and weight of each."""

    def check(self, fields: Collection[str], what: str) -> None:
        """Raise PluginError if a parameter of a function is not a field of the prompt."""
        for _, _, arguments, _ in self.parts:
            arguments.check(fields, what)

    async def __call__(self, episode: Episode) -> Feedback:
        """Return the sum, with the metrics and the answer of each; False of one ``train`` holds for all.

        Raises PluginError if two of them give a metric of the same name.
        """
        metrics: dict[str, Any] = {}
        rewards: list[float] = []
        whole = Feedback()
        for name, function, arguments, weight in self.parts:
            found = function(**arguments(episode))
            found = await found if inspect.isawaitable(found) else found
            feedback = found if isinstance(found, Feedback) else Feedback(reward=found)
            if feedback.reward is None or feedback.error is not None or feedback.unavailable is not None:
                return feedback
            rewards.append(weight * float(feedback.reward))
            given = [(name, float(feedback.reward)), *feedback.metrics.items()]
            taken = [metric for metric, _ in given if metric in metrics] or _repeated(given)
            if taken:
                raise PluginError(
                    f"env: the reward function {name} gives the metric {taken[0]!r}, a name that another "
                    "metric of the list of rewards has (each function is one); rename one of them"
                )
            metrics |= dict(given)
            whole = evolve(
                whole,
                answer=whole.answer if feedback.answer is None else feedback.answer,
                train=whole.train and feedback.train,
                state=feedback.state or whole.state,
            )
        return evolve(whole, reward=fsum(rewards), metrics=metrics)


def _repeated(given: Sequence[tuple[str, Any]]) -> list[str]:
    """Return the name of the function if its feedback has a metric of this name with another value."""
    (name, reward), *metrics = given
    return [metric for metric, value in metrics if metric == name and value != reward]


def added(functions: Sequence[Any]) -> Added:
    """Return the function that adds the rewards of others.

    Raises ConfigError for anything that is neither a function nor a pair of a function and its weight.
    """
    parts: list[tuple[str, Callable[..., Any], Parameters, float]] = []
    for each in functions:
        function, weight = each if isinstance(each, list | tuple) and len(each) == 2 else (each, 1.0)
        if not callable(function) or not isinstance(weight, int | float):
            raise ConfigError(
                f"reward contains {each!r}; expected functions, or pairs of one and its weight: "
                "reward=[exact, (short, 0.1)]"
            )
        name = getattr(function, "__name__", type(function).__name__)
        if any(name == other for other, *_ in parts):  # all lambdas have the same name
            name = f"{name}_{len(parts) + 1}"
        parts.append((name, function, Parameters.of(function, name), weight))
    return Added(parts)


@frozen
class Parameters:
    """The arguments of a reward function, by the names of its parameters."""

    name: str
    needed: Mapping[str, bool]
    """Parameters, and whether they have no default."""
    takes_all: bool
    """Whether it takes every field of a prompt, as ``**fields``."""

    @classmethod
    def of(cls, function: Callable[..., Any], name: str) -> Parameters:
        """Read the signature.  Raises ConfigError for a parameter that cannot be supplied."""
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # some callables written in C have no signature
            raise ConfigError(
                f"env: {name} has no signature; wrap it into a function of reply and answer"
            ) from None
        if rest := [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL)]:
            raise ConfigError(
                f"env: {name} takes {rest[0]}, which has no name; a reward function takes parameters by "
                f"name: {', '.join(KNOWN)}, or fields of its data"
            )
        return cls(
            name,
            {p.name: p.default is p.empty for p in parameters if p.kind is not p.VAR_KEYWORD},
            any(p.kind is p.VAR_KEYWORD for p in parameters),
        )

    def check(self, fields: Collection[str], what: str) -> None:
        """Raise PluginError if a parameter is not a field of a prompt."""
        missing = [key for key, needed in self.needed.items() if needed and key not in (*KNOWN, *fields)]
        if foreign := [key for key in missing if key in TRL]:
            raise PluginError(
                f"env: {self.name} takes {foreign[0]!r}, as reward functions of TRL do; write "
                f"env='trl:./file.py:{self.name}' (pip install grpo-plugin-trl), or take reply"
            )
        if missing:
            raise PluginError(
                f"env: {self.name} takes {missing[0]!r}, and {what} has no such field; it has "
                f"{', '.join([*KNOWN, *fields])}"
            )

    def __call__(self, episode: Episode) -> dict[str, Any]:
        """Return the arguments of a call.  Raises PluginError as ``check`` does."""
        info = episode.prompt.info
        self.check(info, f"prompt {episode.prompt.id!r}")
        given = dict(info) if self.takes_all else {}
        for key in self.needed:
            if key in KNOWN:
                given[key] = KNOWN[key](episode)
            elif key in info:
                given[key] = info[key]
        return given
