"""Samplers that come with the core, and the check that each sampler's draw passes."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from grpo_core.errors import ConfigError, GrpoError, PluginError, did_you_mean
from grpo_core.protocols import Loader, Sampler
from grpo_core.records import Prompt, SampleRequest


class Mix:
    """Draws each prompt's task at random, in proportion to the tasks' weights.

    Args:
        weights: of tasks; a task without one has weight 1, weight 0 leaves it out.
        seed: of the draws.

    Raises:
        ConfigError: a weight is no finite number of at least 0, or names a task that there is not.
    """

    def __init__(self, weights: Mapping[str, float] | None = None, seed: int = 0) -> None:
        self._weights = dict(weights or {})
        self._seed = seed
        self._drawn = 0
        for task, weight in self._weights.items():
            if isinstance(weight, bool) or not isinstance(weight, int | float):
                raise ConfigError(
                    f"sampler mix: the weight of task {task!r} is {weight!r}, expected a number"
                )
            if not 0 <= weight < math.inf:
                raise ConfigError(
                    f"sampler mix: the weight of task {task!r} is {weight}, expected a finite number >= 0"
                )

    def sample(self, loaders: Mapping[str, Loader], request: SampleRequest) -> list[Prompt]:
        tasks = sorted(loaders)
        for task in self._weights:
            if task not in loaders:
                raise ConfigError(
                    f"sampler mix: there is no task {task!r} to weigh.{did_you_mean(task, set(tasks))} "
                    f"Tasks: {', '.join(tasks)}"
                )
        weights = [self._weights.get(task, 1.0) for task in tasks]
        if not any(weights):
            raise ConfigError(
                f"sampler mix: every task has weight 0 ({', '.join(tasks)}); give one of them more"
            )
        # The generator is made anew from the number of prompts drawn, so that this number is all its state.
        generator = random.Random(f"{self._seed}/{self._drawn}")
        chosen = generator.choices(tasks, weights, k=request.expected_prompts)
        self._drawn += request.expected_prompts
        return _draw(loaders, chosen)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = state["drawn"]


class RoundRobin:
    """Draws from the tasks in turn, in the order of their names."""

    def __init__(self) -> None:
        self._drawn = 0

    def sample(self, loaders: Mapping[str, Loader], request: SampleRequest) -> list[Prompt]:
        turns = itertools.islice(itertools.cycle(sorted(loaders)), self._drawn % len(loaders), None)
        chosen = list(itertools.islice(turns, request.expected_prompts))
        self._drawn += request.expected_prompts
        return _draw(loaders, chosen)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self._drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._drawn = state["drawn"]


def _draw(loaders: Mapping[str, Loader], chosen: Iterable[str]) -> list[Prompt]:
    """One prompt of each chosen task, in that order; each loader is asked once."""
    chosen = list(chosen)
    taken = {task: iter(loaders[task].take(count)) for task, count in Counter(chosen).items()}
    return [next(taken[task]) for task in chosen]


def checked_sample(
    sampler: Sampler, name: str, loaders: Mapping[str, Loader], request: SampleRequest
) -> list[Prompt]:
    """What the sampler draws.

    Args:
        sampler: asked once.
        name: as in the configuration, for messages.
        loaders: of all tasks.
        request: how many prompts, and for which versions.

    Raises:
        PluginError: it raised, or did not return exactly as many prompts of these tasks as were asked for.
    """
    who = f"sampler {name!r}"
    try:
        prompts = sampler.sample(loaders, request)
    except GrpoError:
        raise
    except Exception as error:
        raise PluginError(f"{who} raised {type(error).__name__}: {error} (asked with {request})") from error
    if not isinstance(prompts, list | tuple):
        raise PluginError(f"{who} returned {type(prompts).__name__}, expected a list of prompts")
    if len(prompts) != request.expected_prompts:
        raise PluginError(
            f"{who} returned {len(prompts)} prompts, expected exactly {request.expected_prompts} ({request})"
        )
    for index, prompt in enumerate(prompts):
        if not isinstance(prompt, Prompt):
            raise PluginError(f"{who} returned {type(prompt).__name__} at {index}, expected grpo_core.Prompt")
        if prompt.environment not in loaders:
            raise PluginError(
                f"{who} returned a prompt of task {prompt.environment!r} at {index}, "
                f"expected one of {', '.join(sorted(loaders))}"
            )
    return list(prompts)
