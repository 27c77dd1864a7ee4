"""The factory of ``trl:MODULE:NAME``: loads a class or a reward function."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import grpo_core as grpo
from grpo_plugin_trl.environments import TRLEnvironment
from grpo_plugin_trl.rewards import AsyncRewards, RewardFunction, Rewards, reward_function


def make(
    name: str,
    *,
    weight: float = 1.0,
    arguments: Mapping[str, Any] | None = None,
    more: Sequence[str | Mapping[str, Any]] = (),
    conversational: bool = True,
    answer: str = "answer",
    whole_groups: bool = False,
    solution: str = "",
    max_turns: int = 16,
) -> grpo.Environment:
    """Create the environment for a reward function or an environment class.

    Args:
        name: ``module:attribute`` or ``./file.py:attribute``.
        weight: weight of the function.
        arguments: arguments of the attribute, if it is a factory.
        more: further reward functions: a name, or a table of ``function``, ``weight`` and ``arguments``.
        conversational: whether functions receive messages instead of texts.
        answer: keyword argument for the prompt's answer.
        whole_groups: whether each call receives whole groups.
        solution: column with a reply with full marks, for ``grpo-core check`` and the model ``tiny``;
            functions receive it like any other column.
        max_turns: largest number of completions with an environment class.
    """
    found = grpo.load_object(name, who="trl")
    functions = [reward_function(each) for each in more]
    if inspect.isclass(found) and callable(getattr(found, "reset", None)):
        if weight != 1.0:
            raise grpo.ConfigError(
                "an environment's own reward has the weight 1, as with TRL: leave out weight"
            )
        if solution:
            raise grpo.ConfigError(
                f"trl: solution is {solution!r}, but an environment class is solved by calls of its tools, "
                "not by one reply: leave out solution"
            )
        return TRLEnvironment(
            name,
            lambda: found(**(arguments or {})),
            functions,
            conversational=conversational,
            answer=answer,
            max_turns=max_turns,
        )
    first = reward_function({"function": name, "weight": weight, "arguments": arguments})
    everything: list[RewardFunction] = [first, *functions]
    kind = AsyncRewards if any(function.is_async for function in everything) else Rewards
    return kind(
        everything,
        conversational=conversational,
        answer=answer,
        whole_groups=whole_groups,
        solution=solution,
    )
