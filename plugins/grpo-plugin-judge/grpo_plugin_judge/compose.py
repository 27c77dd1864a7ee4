"""The environment ``compose``: combines the rewards of several environments.

    [tasks.math]
    env = "compose"

    [tasks.math.options.parts]
    right = { env = "math:gsm8k" }
    short = { env = "./short.py:Short", weight = 0.2, requires = { right = 1.0 } }

The first part provides prompts, turns, tools and sessions.  The others evaluate the finished conversation.
A part with ``requires`` is evaluated only if the rewards of these earlier parts are high enough, and counts
as 0 otherwise.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import attrs
from attrs import field, frozen

from grpo_core import (
    ConfigError,
    Environment,
    Episode,
    GrpoError,
    PluginError,
    Prompt,
    advantages,
    did_you_mean,
    errors,
)
from grpo_core.environments.feedback import as_feedback
from grpo_core.environments.host import DEADLINE, units
from grpo_core.kit import Judgement, PluginHost, evaluate_of

KEYS = ("env", "options", "weight", "requires")
"""Keys of a part."""

_Questions = list[tuple["Part", list[int]]]
"""Parts that are evaluated concurrently, with the indices of their episodes."""


@frozen(eq=False)
class Part:
    """One of the combined environments.

    Attributes:
        requires: smallest rewards of earlier parts for which this part is evaluated.
    """

    name: str
    environment: Any
    weight: float = 1.0
    requires: Mapping[str, float] = field(factory=dict)

    @property
    def is_async(self) -> bool:
        return inspect.iscoroutinefunction(self.evaluate)

    @property
    def evaluate(self) -> Callable[[Sequence[Episode]], Any]:
        evaluate = evaluate_of(self.environment)
        assert evaluate is not None
        return evaluate

    @property
    def limit(self) -> int | None:
        """Largest number of concurrent calls, if the environment declares it or scores one episode a call."""
        number: int | None = getattr(self.environment, "concurrency", None)
        return getattr(self.evaluate, "concurrency", None) if number is None else number

    def defines(self, name: str) -> bool:
        method = getattr(type(self.environment), name, None)
        return method not in (None, getattr(Environment, name))


class Compose:
    """Combines the rewards of several environments.

    Args:
        parts: the environments by name: ``env``, and optionally ``options``, ``weight`` and ``requires``.
        formula: "sum" is the weighted sum of the rewards, "product" their product.
    """

    def __init__(self, *, parts: Mapping[str, Any], formula: Literal["sum", "product"] = "sum") -> None:
        self._parts = _made(parts)
        self._formula = formula
        self._check()
        first = self._parts[0]
        environments = [part.environment for part in self._parts]
        self.max_turns: int = getattr(first.environment, "max_turns", 1)
        self.tools: Sequence[Any] = getattr(first.environment, "tools", [])
        self.needs_group = any(getattr(each, "needs_group", False) for each in environments)
        self.success = None
        own = getattr(first.environment, "combine", {})  # the others evaluate once, at the end
        self.combine = {first.name: "sum", **{f"{first.name}_{name}": rule for name, rule in own.items()}}
        self.concurrency = self._most_at_once()
        self._gates: dict[str, asyncio.Semaphore] = {}
        """Semaphores for the limits of parts."""
        rounds = [math.ceil((self.concurrency or 0) / (part.limit or math.inf)) or 1 for part in self._parts]
        deadlines = [getattr(each, "deadline", None) for each in environments]
        self.deadline = (
            sum(turns * (each or DEADLINE) for turns, each in zip(rounds, deadlines, strict=True))
            if any(deadlines) or max(rounds) > 1
            else None
        )
        for name in ("prompt", "open", "close"):  # hide what the first part does not define
            if first.defines(name):
                setattr(self, name, getattr(first.environment, name))
        self._stages = _stages(first, self._parts[1:])
        self._is_async = any(part.is_async for part in self._parts)
        self.evaluate = self._later if self._is_async else self._now

    def _most_at_once(self) -> int | None:
        """Return the largest limit, or the limit of a first part that also limits its sessions and tools."""
        first = self._parts[0]
        limits = [part.limit for part in self._parts if part.limit is not None]
        if first.limit is not None and (
            first.defines("open") or len(getattr(first.environment, "tools", ()))
        ):
            return first.limit
        return max(limits, default=None)

    def prompts(self, split: str) -> Sequence[Prompt]:
        prompts: Sequence[Prompt] = self._parts[0].environment.prompts(split)
        return prompts

    def solve(self, prompt: Prompt) -> str | None:
        """Return the first part's solution; it may not be optimal for the other parts."""
        solve = getattr(self._parts[0].environment, "solve", None)
        return solve(prompt) if solve else None

    async def aclose(self) -> None:
        for part in self._parts:
            if part.defines("aclose") and inspect.isawaitable(closing := part.environment.aclose()):
                await closing

    def _check(self) -> None:
        first, *others = self._parts
        for part in self._parts:
            if part.defines("run"):
                raise _refusal(part, "is an agent, which plays by itself; let compose judge it instead")
            if getattr(part.environment, "needs_group", False) and part.requires:
                raise _refusal(part, "compares whole groups, so it cannot require rewards of other parts")
            if self._formula == "product" and part.weight != 1:
                raise _refusal(part, "has a weight, which means nothing in a product: leave it out")
        for part in others:
            if part.defines("open") or len(getattr(part.environment, "tools", ())):
                raise _refusal(part, "has sessions or tools, which only the first part may have")
        turns = getattr(first.environment, "max_turns", 1)
        if turns > 1 and self._formula == "product":
            raise _refusal(first, f"has {turns} turns, whose rewards are added: a product is for one turn")
        if turns > 1 and any(getattr(part.environment, "needs_group", False) for part in others):
            raise _refusal(first, "has turns, and another part compares groups, whose rollouts end together")

    # ------------------------------------------------------------------------------ evaluation

    def _now(self, episodes: Sequence[Episode]) -> list[Judgement]:
        """Evaluate without async parts: the coroutine awaits nothing, so one step completes it."""
        running = self._later(episodes)
        try:
            running.send(None)
        except StopIteration as end:
            feedback: list[Judgement] = end.value
            return feedback
        raise AssertionError("a part that is not async was awaited")

    async def _later(self, episodes: Sequence[Episode]) -> list[Judgement]:
        """Evaluate the first part, then the others stage by stage, and combine the feedback."""
        found: list[dict[str, Judgement]] = [{} for _ in episodes]
        first = self._parts[0]
        await self._evaluate_parts([(first, list(range(len(episodes))))], episodes, found)
        ended = [
            i
            for i, episode in enumerate(episodes)
            if found[i][first.name].done or episode.finish_reason != "stop"
        ]
        for stage in self._stages:
            questions = [(part, [i for i in ended if _counts(part, found[i])]) for part in stage]
            await self._evaluate_parts(
                [(part, indices) for part, indices in questions if indices], episodes, found
            )
        over = set(ended)
        return [self._combined(parts, ended=i in over) for i, parts in enumerate(found)]

    async def _evaluate_parts(
        self, questions: _Questions, episodes: Sequence[Episode], found: list[dict[str, Judgement]]
    ) -> None:
        """Evaluate parts concurrently, and store their feedback."""
        answers = [self._feedback(part, [episodes[i] for i in indices]) for part, indices in questions]
        if self._is_async:
            waiting = {i: answer for i, answer in enumerate(answers) if inspect.isawaitable(answer)}
            for i, answer in zip(waiting, await asyncio.gather(*waiting.values()), strict=True):
                answers[i] = answer
        for (part, indices), answer in zip(questions, answers, strict=True):
            feedback = as_feedback(answer, len(indices), _who(part))
            for index, each in zip(indices, feedback, strict=True):
                found[index][part.name] = each

    def _feedback(self, part: Part, episodes: list[Episode]) -> Any:
        """Return a part's feedback, or an awaitable of it."""
        if not part.is_async or not part.limit:
            return part.evaluate(episodes)
        return self._within_its_limit(part, part.limit, episodes)

    async def _within_its_limit(self, part: Part, limit: int, episodes: list[Episode]) -> list[Judgement]:
        if part.name not in self._gates:
            self._gates[part.name] = asyncio.Semaphore(limit)
        gate, who = self._gates[part.name], _who(part)

        async def one(unit: list[Episode]) -> list[Judgement]:
            async with gate:
                answer = await part.evaluate(unit)
                return as_feedback(answer, len(unit), who, ids=[each.prompt.id for each in unit])

        whole_groups = bool(getattr(part.environment, "needs_group", False))
        found = await asyncio.gather(*map(one, units(episodes, whole_groups=whole_groups)))
        return [feedback for each in found for feedback in each]

    def _combined(self, found: Mapping[str, Judgement], *, ended: bool) -> Judgement:
        """Combine the feedback of parts on an episode; parts that were not evaluated are absent."""
        first = self._parts[0]
        own = found[first.name]
        lost = [(name, each) for name, each in found.items() if each.reward is None and each.done]
        if lost:
            name, feedback = lost[0]
            away = next((each.unavailable for _, each in lost if each.unavailable is not None), None)
            error = f"{name}: {feedback.error or 'unscored'}"
            return Judgement(error=error, unavailable=away, metrics=self._metrics(found))
        worth = {
            part.name: part.weight * (found[part.name].reward or 0.0) if part.name in found else 0.0
            for part in self._parts
        }
        reward: float | None = (
            math.prod(worth.values()) if self._formula == "product" else sum(worth.values())
        )
        if not ended:
            reward = None if own.reward is None else first.weight * own.reward
        return attrs.evolve(
            own,
            reward=reward,
            metrics=self._metrics(found),
            left_out={
                f"{part}_{name}": text for part, each in found.items() for name, text in each.left_out.items()
            },
            answer=next((each.answer for each in found.values() if each.answer is not None), None),
            train=all(feedback.train for feedback in found.values()),
        )

    def _metrics(self, found: Mapping[str, Judgement]) -> dict[str, float]:
        """Return the metrics of all parts.  Raises PluginError if two have the same name."""
        metrics: list[tuple[str, float]] = []
        for part in self._parts:
            if part.requires:
                metrics.append((f"{part.name}_asked", float(part.name in found)))
            if (feedback := found.get(part.name)) is not None:
                if feedback.reward is not None:
                    metrics.append((part.name, feedback.reward))
                metrics += [(f"{part.name}_{name}", value) for name, value in feedback.metrics.items()]
        counted = Counter(name for name, _ in metrics)
        if repeated := [name for name, count in counted.items() if count > 1]:
            raise PluginError(
                f"compose: two metrics have the name {repeated[0]!r}, which begins with the name of a part; "
                "rename a part in options.parts"
            )
        return dict(metrics)


def _who(part: Part) -> str:
    return f"compose: part {part.name!r}"


def _counts(part: Part, found: Mapping[str, Judgement]) -> bool:
    """Whether a part is evaluated: all required rewards exist and are high enough."""
    rewards = {name: found[name].reward if name in found else None for name in part.requires}
    return all(
        reward is not None and advantages.reaches(reward, part.requires[name])
        for name, reward in rewards.items()
    )


def _stages(first: Part, others: Sequence[Part]) -> list[list[Part]]:
    """Group the parts into stages; each part comes after the parts that it requires."""
    depth = {first.name: 0}
    stages: dict[int, list[Part]] = {}
    for part in others:
        depth[part.name] = 1 + max((depth[name] for name in part.requires), default=0)
        stages.setdefault(depth[part.name], []).append(part)
    return [stages[number] for number in sorted(stages)]


def _made(parts: Mapping[str, Any]) -> list[Part]:
    """Create the environments.  Raises ConfigError, PluginError."""
    if not parts:
        raise ConfigError("compose: there are no parts; name environments in options.parts")
    host = PluginHost.current()
    made: dict[str, Part] = {}
    for name, given in parts.items():
        if not isinstance(given, Mapping) or not isinstance(given.get("env"), str):
            raise ConfigError(f'compose: part {name!r} is {given!r}; expected a table with env = "NAME"')
        if unknown := sorted(set(given) - set(KEYS)):
            near = did_you_mean(unknown[0], set(KEYS))
            raise ConfigError(
                f"compose: part {name!r} has no key {unknown[0]!r}.{near} Its keys: {', '.join(KEYS)}"
            )
        weight, requires = _number(name, "weight", given.get("weight", 1.0)), dict(given.get("requires", {}))
        for other, least in requires.items():
            if other not in made:
                raise ConfigError(
                    f"compose: part {name!r} requires {other!r}, which is not a part before it; those "
                    f"before it are {', '.join(made) or '(none)'}"
                )
            requires[other] = _number(name, f"requires.{other}", least)
        try:
            environment = host.make("environment", given["env"], **given.get("options", {}))
        except GrpoError as error:
            kind = ConfigError if error.exit_status == ConfigError.exit_status else PluginError
            raise kind(f"part {name!r}: {errors.describe(error)}") from error
        made[name] = Part(name, environment, weight, requires)
    return list(made.values())


def _number(part: str, key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ConfigError(f"compose: part {part!r}: {key} is {value!r}; expected a finite number")
    return float(value)


def _refusal(part: Part, why: str) -> ConfigError:
    return ConfigError(f"compose: part {part.name!r} {why}")
