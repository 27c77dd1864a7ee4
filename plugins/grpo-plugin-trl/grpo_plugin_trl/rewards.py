"""Calls of reward functions with the interface of TRL's GRPOTrainer, and their weighted sum."""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from attrs import field, frozen

import grpo_core as grpo

NOT_PASSED = frozenset({"prompt", "completion", "completion_ids"})
"""Columns that TRL does not pass, because they are names of its arguments."""


@frozen
class RewardFunction:
    """A reward function with its weight."""

    name: str
    call: Callable[..., Any]
    weight: float = 1.0

    @property
    def is_async(self) -> bool:
        call = _unwrapped(self.call)
        return inspect.iscoroutinefunction(call) or inspect.iscoroutinefunction(type(call).__call__)


def reward_function(given: str | Mapping[str, Any]) -> RewardFunction:
    """Load a function of the configuration.  Raises ConfigError."""
    table: dict[str, Any] = {"function": given} if isinstance(given, str) else dict(given)
    if unknown := sorted(set(table) - {"function", "weight", "arguments"}):
        raise grpo.ConfigError(
            f"trl: a reward function has no {unknown[0]!r}; it has function, weight, arguments"
        )
    if "function" not in table:
        raise grpo.ConfigError(f"trl: {given!r} names no function: {{function = 'module:name', weight = 1}}")
    function = grpo.load_object(table["function"], who="trl")
    weight, arguments = table.get("weight", 1.0), table.get("arguments")
    if arguments is not None:
        try:
            function = function(**arguments)
        except Exception as error:
            raise grpo.ConfigError(f"trl: {table['function']} with {arguments!r} raised {error!r}") from error
    if isinstance(function, str) or not callable(function):
        raise grpo.ConfigError(
            f"trl: {table['function']} is {type(function).__name__}; expected a function. Reward models are "
            "not supported: write a function that asks the model"
        )
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
        raise grpo.ConfigError(
            f"trl: the weight of {table['function']} is {weight!r}; expected a finite number"
        )
    bare = _unwrapped(function)
    return RewardFunction(str(getattr(bare, "__name__", type(bare).__name__)), function, float(weight))


def _unwrapped(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


@frozen
class Call:
    """The arguments of one call, and the logged metrics."""

    arguments: Mapping[str, Any]
    size: int
    logged: dict[str, float] = field(factory=dict)

    @classmethod
    def of(
        cls,
        episodes: Sequence[grpo.Episode],
        *,
        conversational: bool,
        answer: str,
        columns: dict[str, None],
        environments: Sequence[Any] | None = None,
    ) -> Call:
        """Return the arguments that TRL's trainer would pass for these episodes.

        Args:
            columns: columns of earlier calls; extended by these rows.  TRL passes every column of a data set,
                but prompts lack fields that are null.
        """
        prompts = [_messages(e.prompt.messages) for e in episodes]
        completions = [_messages(e.messages[len(e.prompt.messages) :]) for e in episodes]
        rows = [row_of(e.prompt, answer) for e in episodes]
        columns |= dict.fromkeys(key for row in rows for key in row if key not in NOT_PASSED)
        call = cls({}, len(episodes))
        arguments: dict[str, Any] = {
            **{key: [row.get(key) for row in rows] for key in columns},
            "prompts": prompts if conversational else [_text(each) for each in prompts],
            "completions": completions if conversational else [_text(each) for each in completions],
            "completion_ids": [UnknownIds(e.completion_tokens) for e in episodes],
            "trainer_state": NoTrainerState(),
            "log_extra": lambda column, values: None,
            "log_metric": call.log,
        }
        if environments is not None:
            arguments["environments"] = list(environments)
        return cls(arguments, call.size, call.logged)

    def log(self, name: str, value: float) -> None:
        """Record a number as a metric of each episode of the call."""
        self.logged[name] = float(value)

    def checked(self, function: RewardFunction, returned: Any) -> list[float | None]:
        """Return the rewards, with None for NaN.  Raises PluginError for a wrong number of rewards."""
        rewards = list(returned)
        if len(rewards) != self.size:
            raise grpo.PluginError(
                f"trl: the reward function {function.name!r} returned {len(rewards)} rewards for {self.size} "
                "completions; it returns exactly one for each"
            )
        try:
            return [None if r is None or math.isnan(float(r)) else float(r) for r in rewards]
        except (TypeError, ValueError) as error:
            raise grpo.PluginError(
                f"trl: the reward function {function.name!r} returned a value that is not a number: {error}"
            ) from error


class UnknownIds(Sequence[int]):
    """Stand-in for the token ids of a completion; environments know only their number."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and index >= self._size:
            raise IndexError(index)  # ends loops over an empty completion
        raise TypeError(
            "completion_ids: environments of grpo-core know the number of a completion's tokens, "
            "len(completion_ids[i]), and not the tokens"
        )


class NoTrainerState:
    """Stand-in for the state of TRL's trainer, which is not available."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"trainer_state.{name}: environments of grpo-core do not see the trainer; a reward that changes "
            "during a run belongs in [shaping] or an advantage function"
        )


class Rewards(grpo.Environment):
    """The weighted sum of reward functions, each called with a batch of episodes.

    The prompts come from the task's ``data``.
    """

    def __init__(
        self,
        functions: Sequence[RewardFunction],
        *,
        conversational: bool,
        answer: str,
        whole_groups: bool,
        solution: str = "",
    ) -> None:
        self._functions = named(functions)
        self._conversational, self._answer, self._solution = conversational, answer, solution
        self._columns: dict[str, None] = {}
        self.needs_group = whole_groups

    def prompts(self, split: str) -> Sequence[grpo.Prompt]:
        raise grpo.ConfigError(
            "trl: reward functions have no prompts; give them with tasks.NAME.data "
            "(and validation_data, or validation.every = 0)"
        )

    def solve(self, prompt: grpo.Prompt) -> str | None:
        """Return the column ``solution`` of the row.

        Raises ConfigError if there is no such column.
        """
        row = row_of(prompt, self._answer)
        self._columns |= dict.fromkeys(key for key in row if key not in NOT_PASSED)
        if self._solution and self._solution not in {**self._columns, **row}:
            raise grpo.ConfigError(
                f"trl: solution = {self._solution!r} is not a column of the data, which has "
                f"{', '.join(sorted(row)) or 'none'}"
            )
        return str(row[self._solution]) if row.get(self._solution) is not None else None

    def evaluate(self, episodes: Sequence[grpo.Episode]) -> Any:
        call = self._call(episodes)
        return combined(
            self._functions, [call.checked(f, f.call(**call.arguments)) for f in self._functions], call
        )

    def _call(self, episodes: Sequence[grpo.Episode]) -> Call:
        return Call.of(
            episodes, conversational=self._conversational, answer=self._answer, columns=self._columns
        )


class AsyncRewards(Rewards):
    """``Rewards`` with async functions, which run concurrently after the others."""

    async def evaluate(self, episodes: Sequence[grpo.Episode]) -> list[grpo.Feedback]:
        call = self._call(episodes)
        return combined(self._functions, await called(self._functions, call), call)


async def called(functions: Sequence[RewardFunction], call: Call) -> list[list[float | None]]:
    """Return the rewards of each function."""
    returned = [function.call(**call.arguments) for function in functions]
    waiting = [i for i, each in enumerate(returned) if inspect.isawaitable(each)]
    awaited: list[Awaitable[Any]] = [returned[i] for i in waiting]
    for i, result in zip(waiting, await asyncio.gather(*awaited), strict=True):
        returned[i] = result
    return [call.checked(f, each) for f, each in zip(functions, returned, strict=True)]


def combined(
    functions: Sequence[RewardFunction], rewards: Sequence[Sequence[float | None]], call: Call
) -> list[grpo.Feedback]:
    """Return the weighted sum of the rewards that are not None; an episode without any is unscored."""
    feedback = []
    for parts in zip(*rewards, strict=True):
        known = [(f, part) for f, part in zip(functions, parts, strict=True) if part is not None]
        feedback.append(
            grpo.Feedback(
                reward=sum(f.weight * part for f, part in known) if known else None,
                metrics={**call.logged, **{f.name: part for f, part in known}},
            )
        )
    return feedback


def named(functions: Sequence[RewardFunction]) -> list[RewardFunction]:
    """Return the functions with unique names; the second ``accuracy`` is ``accuracy_2``."""
    seen: dict[str, int] = {}
    result = []
    for function in functions:
        seen[function.name] = number = seen.get(function.name, 0) + 1
        name = function.name if number == 1 else f"{function.name}_{number}"
        result.append(RewardFunction(name, function.call, function.weight))
    return result


def row_of(prompt: grpo.Prompt, answer: str) -> dict[str, Any]:
    """Return the columns of a prompt's row, without the prompt."""
    return {**({} if prompt.answer is None else {answer: prompt.answer}), **prompt.info}


def _messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]


def _text(messages: Sequence[Mapping[str, Any]]) -> str:
    return "".join(str(message.get("content") or "") for message in messages)
