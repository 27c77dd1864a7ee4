"""The built-in samplers, exact shares of tasks, and the check of what any sampler returns."""

from __future__ import annotations

import inspect
import json
import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

from attrs import asdict, define, field

from grpo_core.contracts.errors import (
    CheckpointError,
    ConfigError,
    GrpoError,
    PluginError,
    describe,
    did_you_mean,
    plugin_errors,
)
from grpo_core.contracts.events import PromptsPassedOver
from grpo_core.contracts.protocols import Loader, Sampler
from grpo_core.contracts.records import Group, Prompt, SampleRequest
from grpo_core.contracts.typed import Count, checked
from grpo_core.data.loaders import LookAhead
from grpo_core.text.messages import readable

DIGITS = 6
"""Decimals by which tasks are compared, so that rounding does not separate equal debts."""


@define
class Quotas:
    """Divides the prompts of requests among tasks by largest remainders.

    A task is owed its share of all prompts so far, minus the prompts it got.  It never gets a whole prompt
    too many, and it has exactly its share whenever the shares of all tasks are whole numbers.
    """

    owed: dict[str, float]
    """Prompts owed by task; their sum is 0 between two requests, except for rounding."""
    lost: list[tuple[str, int]]
    """Task and target version of each prompt that another one of its task has to replace."""

    def divide(self, weights: Mapping[str, float], n: int, target: int = 0) -> list[str]:
        """Return the tasks of ``n`` prompts, mixed evenly; ``weights`` are at least 0, and not all 0.

        Prompts that were lost are replaced first, those for the step ``target`` before the others.  A task
        without a weight has no share, and its debt is dropped.
        """
        shares = {task: weight for task, weight in sorted(weights.items()) if weight > 0}
        lost = sorted((one for one in self.lost if one[0] in shares), key=lambda one: one[1] != target)
        counts = Counter(task for task, _ in lost[:n])
        self.lost = lost[n:]
        left = n - counts.total()
        owed = {task: self.owed.get(task, 0.0) for task in shares}
        missing = left - sum(owed.values())  # of removed tasks; otherwise their sum is 0
        total = sum(shares.values())
        owed = {task: owed[task] + missing * share / total for task, share in shares.items()}
        for _ in range(left):
            most = max(owed, key=lambda task: round(owed[task], DIGITS))
            owed[most] -= 1
            counts[most] += 1
        self.owed = owed
        return _mixed(counts)


def _mixed(counts: Mapping[str, int]) -> list[str]:
    """Return each task as often as counted, spread so that every part of the list has about its share."""
    ordered: Sequence[tuple[float, str]] = sorted(
        ((i + 0.5) / count, task) for task, count in counts.items() for i in range(count)
    )
    return [task for _, task in ordered]


class TaskSampler:
    """Base class of samplers that choose tasks and whose only state is the number of prompts drawn.

    A subclass chooses the tasks; ``self.drawn`` is the place in the stream of the first requested prompt.
    """

    name = "drawing"
    """Name of the sampler in messages."""

    def __init__(self) -> None:
        self.drawn = 0

    def choose(self, tasks: Sequence[str], request: SampleRequest) -> Sequence[str]:
        """Return ``request.expected_prompts`` of ``tasks``, which are sorted by name."""
        raise NotImplementedError(f"{type(self).__name__} does not define choose(tasks, request)")

    def sample(self, loaders: Mapping[str, Loader], request: SampleRequest) -> list[Prompt]:
        chosen = self.choose(sorted(loaders), request)
        self.drawn += len(chosen)
        return take_prompts(loaders, chosen)

    def state_dict(self) -> dict[str, Any]:
        return {"drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.drawn = checked(checked(state, dict[str, Any]).get("drawn"), Count, "drawn")

    def known(self, given: Iterable[str], tasks: Sequence[str], to_do: str) -> None:
        """Raise ConfigError for an unknown task."""
        for task in given:
            if task not in tasks:
                near = did_you_mean(task, set(tasks))
                raise ConfigError(
                    f"sampler {self.name}: there is no task {task!r} to {to_do}.{near} "
                    f"Tasks: {', '.join(tasks)}"
                )


Shares = Literal["random", "drawn", "trained"]


class WeightedTaskSampler(TaskSampler):
    """Base class of samplers that draw each prompt's task in proportion to weights.

    Args:
        seed: seed of the draws.
        shares: ``"random"`` leaves a task's share of a request to chance.  ``"drawn"`` makes it exact: the
            remainder is carried over to the next request.  ``"trained"`` also replaces each prompt that is
            filtered or skipped by one of the same task.
    """

    def __init__(self, seed: int = 0, shares: Shares = "random") -> None:
        super().__init__()
        self._seed = seed
        self._shares = shares
        self._quotas = Quotas({}, [])

    def weights(self, tasks: Sequence[str], request: SampleRequest) -> Sequence[float]:
        """Return a weight for each task: finite, at least 0, and not all 0."""
        raise NotImplementedError(f"{type(self).__name__} does not define weights(tasks, request)")

    def choose(self, tasks: Sequence[str], request: SampleRequest) -> Sequence[str]:
        weights = self.weights(tasks, request)
        if not any(weights):
            raise ConfigError(
                f"sampler {self.name}: every task has weight 0 at step {request.target_version} "
                f"({', '.join(tasks)}); give one of them more"
            )
        if self._shares != "random":
            shares = dict(zip(tasks, weights, strict=True))
            return self._quotas.divide(shares, request.expected_prompts, request.target_version)
        # A new generator is seeded with the number of prompts drawn, so that this number is the whole state.
        return random.Random(f"{self._seed}/{self.drawn}").choices(tasks, weights, k=request.expected_prompts)

    def untrained(self, prompt: Prompt, target_version: int) -> None:
        """Remember the task of a prompt that was filtered or skipped, if another has to replace it."""
        if self._shares == "trained":
            self._quotas.lost.append((prompt.environment, target_version))

    def state_dict(self) -> dict[str, Any]:
        quotas = {} if self._shares == "random" else {"quotas": asdict(self._quotas)}
        return {**super().state_dict(), **quotas}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if "quotas" in state:
            self._quotas = checked(state["quotas"], Quotas, "quotas")

    def checked(self, task: str, weight: Any) -> float:
        """Return the weight.  Raises ConfigError if it is not a finite number of at least 0."""
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            expected = "a number"
        elif not 0 <= weight < math.inf:
            expected = "a finite number >= 0"
        else:
            return float(weight)
        raise ConfigError(
            f"sampler {self.name}: the weight of task {task!r} is {weight!r}, expected {expected}"
        )


class Mix(WeightedTaskSampler):
    """Draws each prompt's task in proportion to the tasks' weights, at random or in exact shares.

    Args:
        weights: weight of each task.  A task without one has weight 1, weight 0 leaves it out.  Default: the
            tasks' weights in the configuration.
        seed: seed of the draws.  Default: the run's seed.
        shares: how many prompts of a request each task gets: ``"random"`` leaves it to chance; ``"drawn"`` is
            exact, with the remainder carried over; ``"trained"`` also replaces a prompt that is
            filtered or skipped by one of the same task.

    Raises:
        ConfigError: a weight is not a finite number of at least 0, or names an unknown task.
    """

    name = "mix"

    def __init__(
        self, weights: Mapping[str, float] | None = None, seed: int = 0, shares: Shares = "random"
    ) -> None:
        super().__init__(seed, shares)
        self._weights = {task: self.checked(task, weight) for task, weight in (weights or {}).items()}

    def weights(self, tasks: Sequence[str], request: SampleRequest) -> list[float]:
        self.known(self._weights, tasks, "weigh")
        return [self._weights.get(task, 1.0) for task in tasks]


class RoundRobin(TaskSampler):
    """Draws from the tasks in turn, in alphabetical order."""

    name = "round_robin"

    def choose(self, tasks: Sequence[str], request: SampleRequest) -> list[str]:
        return [tasks[(self.drawn + i) % len(tasks)] for i in range(request.expected_prompts)]


class FunctionSampler(Sampler):
    """A sampler without a state: a function of the loaders and the request."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def sample(self, loaders: Mapping[str, Loader], request: SampleRequest) -> Any:
        return self._function(loaders, request)


def draws_itself(factory: Callable[..., Any], options: Collection[str]) -> bool:
    """Return whether a function is a sampler, ``(loaders, request) -> prompts``, and not a factory."""
    if not inspect.isfunction(factory):
        return False
    needed = [
        each.name
        for each in inspect.signature(factory).parameters.values()
        if each.kind is each.POSITIONAL_OR_KEYWORD and each.default is each.empty
    ]
    return len(needed) == 2 and not set(needed) & set(options)


def take_prompts(loaders: Mapping[str, Loader], chosen: Iterable[str]) -> list[Prompt]:
    """Return the next prompt of each chosen task, in the order of ``chosen``; calls each loader once."""
    chosen = list(chosen)
    drawn = {task: iter(loaders[task].take(count)) for task, count in Counter(chosen).items()}
    return [next(drawn[task]) for task in chosen]


@define(kw_only=True, eq=False)
class PromptStream:
    """The prompts of a run: a sampler that draws from the loaders of all tasks."""

    sampler: Sampler
    loaders: Mapping[str, Loader]
    name: str
    """Name of the sampler in the configuration, for messages."""
    passed_over: list[PromptsPassedOver] = field(init=False, factory=list)
    """Events about prompts that the sampler looked at; the code that emits them clears the list."""
    _drawn: bool = field(init=False, default=False)

    def ready(self, n: int, changed: Callable[[], None]) -> bool:
        """Return whether each loader has the prompts for a request of ``n``: all may come from one.

        If not, ``changed`` is called on the running event loop when another call may succeed.
        """
        wanted = n * max(1, int(getattr(self.sampler, "looks_at", 1)))
        waiting = [each for each in self.loaders.values() if isinstance(each, LookAhead)]
        ready = [each.ready(wanted, changed) for each in waiting]  # loaders that are not ready begin to read
        return all(ready)

    def draw(self, request: SampleRequest) -> list[Prompt]:
        """Return exactly the expected number of prompts.

        Raises PluginError if the sampler breaks its contract: see ``checked_sample``, and a prompt that it
        takes from a loader and does not return would never be trained.
        """
        looks_at = int(getattr(self.sampler, "looks_at", 0))
        watched = {task: _WatchedLoader(task, loader, looks_at) for task, loader in self.loaders.items()}
        prompts = checked_sample(self.sampler, self.name, watched, request)
        self.passed_over += [event for loader in watched.values() for event in loader.events()]
        drawn = [prompt for loader in watched.values() for prompt in loader.drawn]
        if lost := _ids(drawn) - _ids(prompts):
            (task, name), *more = lost
            others = f" and {len(more)} others" if more else ""
            raise PluginError(
                f"sampler {self.name!r} took prompt {name!r} of task {task!r}{others} from a loader and did "
                "not return it; take exactly as many as are returned, or the rest is never trained"
            )
        if not self._drawn:
            self._drawn = True
            self.state_dict()  # a state that cannot be saved is an error now, and not at the first checkpoint
        known = set(map(id, drawn))
        return [
            prompt if id(prompt) in known else readable(prompt, f"sampler {self.name!r}")
            for prompt in prompts
        ]

    def observe(self, groups: Sequence[Group]) -> None:
        """Pass finished groups to the sampler, if it observes them."""
        if hasattr(self.sampler, "observe"):
            with plugin_errors(f"sampler {self.name!r}: observe()"):
                self.sampler.observe(groups)

    def untrained(self, prompt: Prompt, target_version: int) -> None:
        """Notify the sampler, if it has ``untrained``, that a prompt was filtered or skipped."""
        if hasattr(self.sampler, "untrained"):
            with plugin_errors(f"sampler {self.name!r}: untrained()"):
                self.sampler.untrained(prompt, target_version)

    def state_dict(self) -> Any:
        """Return a copy of the sampler's state, or None if it has none.

        Raises PluginError if the state cannot be saved.
        """
        return plugin_state(self.sampler, f"sampler {self.name!r}")

    def load_state_dict(self, state: Any) -> None:
        """Continue from a state.  Raises CheckpointError if the sampler does not know it."""
        load_plugin_state(self.sampler, f"sampler {self.name!r}", state)


@define(eq=False)
class _WatchedLoader:
    """The loader of a request, which remembers what was taken and skipped."""

    _task: str
    _loader: Loader
    _looks_at: int
    """Whether the sampler skips prompts: then what it took is an event."""
    drawn: list[Prompt] = field(init=False, factory=list)
    """Prompts that were taken and not skipped."""
    _taken: list[Prompt] = field(init=False, factory=list)
    _skipped: list[tuple[int, str]] = field(init=False, factory=list)

    def take(self, n: int) -> list[Prompt]:
        prompts = self._loader.take(n)
        self.drawn += prompts
        self._taken += prompts if self._looks_at else []
        return prompts

    def skip(self, prompt: Prompt, reason: str) -> None:
        where = next((nth for nth, each in enumerate(self.drawn) if each is prompt), None)
        if where is None or not reason or not self._looks_at:
            raise PluginError(
                f"prompt {prompt.id!r} of task {self._task!r} was skipped with the reason {reason!r}; skip "
                "what was taken in the same request, with a reason, and set looks_at"
            )
        del self.drawn[where]
        self._skipped.append((self._loader.place(prompt), reason))
        self._loader.skip(prompt, reason)

    def events(self) -> Iterator[PromptsPassedOver]:
        """Yield what the sampler looked at."""
        if self._taken:
            yield PromptsPassedOver(
                task=self._task,
                size=len(self),
                offered=tuple(map(self._loader.place, self._taken)),
                drawn=tuple(prompt.id for prompt in self.drawn),
                passed_over=tuple(self._skipped),
            )

    def __len__(self) -> int:
        return len(self._loader)

    def place(self, prompt: Prompt) -> int:
        return self._loader.place(prompt)


def _ids(prompts: Iterable[Prompt]) -> Counter[tuple[str, str]]:
    return Counter((prompt.environment, prompt.id) for prompt in prompts)


def plugin_state(part: Any, who: str) -> Any:
    """Return the state of a sampler or strategy for a checkpoint, as JSON values; None without a state.

    Raises PluginError, which names ``who``, if the state is not JSON.
    """
    if not hasattr(part, "state_dict"):
        return None
    with plugin_errors(f"{who}: state_dict()"):
        state = part.state_dict()
    try:
        return json.loads(json.dumps(state, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise PluginError(
            f"{who}: its state_dict() cannot be saved as JSON: {error}; return dicts with strings "
            "as keys, lists, strings, and finite numbers"
        ) from error


def load_plugin_state(part: Any, who: str, state: Any) -> None:
    """Continue from what ``plugin_state`` returned, unless the part is in that state already.

    Raises CheckpointError if the part does not know it.
    """
    if state is None or not hasattr(part, "load_state_dict") or plugin_state(part, who) == state:
        return
    try:
        part.load_state_dict(state)
    except GrpoError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{who} cannot continue from its state in the checkpoint (pipeline.json): {describe(error)}"
        ) from error


def checked_sample(
    sampler: Sampler, name: str, loaders: Mapping[str, Loader], request: SampleRequest
) -> list[Prompt]:
    """Call a sampler and check the prompts that it returns.

    Args:
        sampler: the sampler, which is called once.
        name: name of the sampler in the configuration, for messages.
        loaders: the loaders of all tasks.
        request: number of prompts, and the versions they are for.

    Raises:
        PluginError: the sampler raised, or did not return exactly the requested number of prompts of these
            tasks.
    """
    who = f"sampler {name!r}"
    with plugin_errors(who, f" (request: {request})"):
        prompts = sampler.sample(loaders, request)
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
