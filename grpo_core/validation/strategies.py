"""The validation strategies that the core offers.

All of them score each prompt by itself, from the rollouts of it that have feedback, and give for each task
the mean over its prompts with a bootstrap interval.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, get_args

from grpo_core.errors import ConfigError
from grpo_core.metrics import FULL_REWARD
from grpo_core.protocols import ValidationContext
from grpo_core.records import Rollout
from grpo_core.turns import derive_seed
from grpo_core.validation.estimates import majority, pass_at_k, with_interval

Mode = Literal["batched", "pipelined"]


class Strategy:
    """``n`` rollouts of each prompt, and the mean over prompts of what ``scores`` says.

    Metrics of each task: those of ``scores``, each with ``/low`` and ``/high``; ``reward/NAME`` for the parts
    that the environment names; ``completion_tokens``; ``truncated``, the share that ended at a limit;
    ``prompts``, those that count; ``errors``, the rollouts unscored, which do not count.

    Raises ConfigError if an option is out of its range.

    Args:
        n: rollouts of each prompt.
        temperature: 0 is greedy decoding.
        max_tokens: of one completion; None: as in training.
        mode: ``"pipelined"``: each rollout at its own pace; the environment's batching merges what arrives
            together.  ``"batched"``: all rollouts in lockstep, with one environment call a turn.
        confidence: of the intervals.
    """

    needed: int = 1
    """Rollouts with feedback without which a prompt does not count."""

    def __init__(
        self,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        mode: Mode = "pipelined",
        confidence: float = 0.95,
    ) -> None:
        _expect(_whole(n) and n >= 1, "n", n, "a whole number of at least 1")
        _expect(_number(temperature) and temperature >= 0, "temperature", temperature, "0 or more")
        fine = max_tokens is None or (_whole(max_tokens) and max_tokens >= 1)
        _expect(fine, "max_tokens", max_tokens, "a whole number of at least 1")
        _expect(mode in get_args(Mode), "mode", mode, "'batched' or 'pipelined'")
        _expect(_number(confidence) and 0 < confidence < 1, "confidence", confidence, "within 0 and 1")
        self.n, self.temperature, self.max_tokens = n, float(temperature), max_tokens
        self.mode, self.confidence = mode, float(confidence)

    def scores(self, rollouts: Sequence[Rollout]) -> Mapping[str, float]:
        """Of one prompt, from its rollouts with feedback: ``needed`` of them or more."""
        return {"accuracy": fmean(map(_correct, rollouts)), "reward": fmean(map(_reward, rollouts))}

    async def validate(self, context: ValidationContext) -> dict[str, dict[str, float]]:
        tasks = sorted(context.prompts)
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(self._measure(context, task)) for task in tasks]
        return {task: of_task.result() for task, of_task in zip(tasks, running, strict=True)}

    async def _measure(self, context: ValidationContext, task: str) -> dict[str, float]:
        rollouts = await context.rollout(
            context.prompts[task],
            n=self.n,
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            mode=self.mode,
        )
        return self._summary(task, rollouts)

    def _summary(self, task: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
        of_prompts = [
            [rollout for rollout in rollouts[i : i + self.n] if rollout.reward is not None]
            for i in range(0, len(rollouts), self.n)
        ]
        counted = [judged for judged in of_prompts if len(judged) >= self.needed]
        values: dict[str, list[float]] = defaultdict(list)
        for judged in counted:
            for name, value in self.scores(judged).items():
                values[name].append(value)
        seed = derive_seed("bootstrap", task)
        summary: dict[str, float] = {}
        for name, those in values.items():
            summary |= with_interval(name, those, seed=seed, confidence=self.confidence)
        summary |= _descriptions([rollout for judged in counted for rollout in judged])
        errors = len(rollouts) - sum(map(len, of_prompts))
        return summary | {"prompts": float(len(counted)), "errors": float(errors)}


class Batched(Strategy):
    """Turn by turn: one environment call a turn for all live episodes of a task, of ``max_batch`` at most."""

    played: Mode = "batched"

    def __init__(
        self,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        confidence: float = 0.95,
    ) -> None:
        super().__init__(n, temperature, max_tokens, self.played, confidence)


class Pipelined(Batched):
    """Each rollout goes on as soon as it can; environment calls are merged by what arrives together."""

    played: Mode = "pipelined"


class Greedy(Strategy):
    """One rollout of each prompt, always the likeliest token."""

    def __init__(
        self, max_tokens: int | None = None, mode: Mode = "pipelined", confidence: float = 0.95
    ) -> None:
        super().__init__(1, 0.0, max_tokens, mode, confidence)


class PassAtK(Strategy):
    """``pass@k``: how often at least one of ``k`` rollouts has full marks, without bias (Chen et al. 2021).

    A prompt with fewer than ``k`` feedback does not count; give ``n`` above ``k`` for a smaller variance, and
    for some to spare.

    Args:
        k: a number, or several.
        n: rollouts of each prompt; None: the largest ``k``.
    """

    def __init__(
        self,
        k: int | Sequence[int] = 8,
        n: int | None = None,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        mode: Mode = "pipelined",
        confidence: float = 0.95,
    ) -> None:
        several: list[Any] = list(k) if isinstance(k, list | tuple) else [k]
        fine = bool(several) and all(_whole(each) and each >= 1 for each in several)
        _expect(fine, "k", k, "whole numbers of at least 1")
        self.k: list[int] = sorted(set(several))
        super().__init__(self.k[-1] if n is None else n, temperature, max_tokens, mode, confidence)
        _expect(self.n >= self.k[-1], "n", n, f"at least the largest k, {self.k[-1]}")
        _expect_variety(self)
        self.needed = self.k[-1]

    def scores(self, rollouts: Sequence[Rollout]) -> Mapping[str, float]:
        n, correct = len(rollouts), round(sum(map(_correct, rollouts)))
        return {f"pass@{k}": pass_at_k(n, correct, k) for k in self.k} | dict(super().scores(rollouts))


class Majority(Strategy):
    """``maj@n``: how often the answer that most of ``n`` rollouts give is right (Wang et al. 2022).

    Answers are those that the environment reports (``Feedback.answer``); replies without one abstain.  Where
    no reply to a prompt has one, the whole replies are compared, without regard to case and white space.
    Answers that share the lead count with the mean of their scores.
    """

    def __init__(
        self,
        n: int = 8,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        mode: Mode = "pipelined",
        confidence: float = 0.95,
    ) -> None:
        super().__init__(n, temperature, max_tokens, mode, confidence)
        _expect_variety(self)

    def scores(self, rollouts: Sequence[Rollout]) -> Mapping[str, float]:
        votes = [(str(r.answer), _correct(r)) for r in rollouts if r.answer is not None]
        votes = votes or [(_normalised(r), _correct(r)) for r in rollouts]
        return {f"maj@{self.n}": majority(votes), **super().scores(rollouts)}


# ---------------------------------------------------------------------------------- of rollouts


def _correct(rollout: Rollout) -> float:
    return float(_reward(rollout) >= FULL_REWARD)


def _reward(rollout: Rollout) -> float:
    assert rollout.reward is not None
    return rollout.reward


def _normalised(rollout: Rollout) -> str:
    """The last completion."""
    said = [m for m in rollout.messages if m.get("role") == "assistant"]
    return " ".join(str(said[-1].get("content") or "").split()).casefold() if said else ""


def _descriptions(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Means over rollouts, for which nobody needs an interval."""
    if not rollouts:
        return {}
    parts: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.metrics.items():
            parts[name].append(float(value))
    return {
        **{f"reward/{name}": fmean(values) for name, values in sorted(parts.items())},
        "completion_tokens": fmean(sum(rollout.sampled) for rollout in rollouts),
        "truncated": fmean(float(rollout.finish_reason in _LIMITS) for rollout in rollouts),
    }


_LIMITS = {"length", "turns", "tokens", "tool_calls"}


# ---------------------------------------------------------------------------------- of options


def _expect_variety(strategy: Strategy) -> None:
    if strategy.n > 1:
        _expect(strategy.temperature > 0, "temperature", 0, "more than 0: greedy rollouts are all the same")


def _expect(holds: bool, option: str, given: Any, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{option} is {given!r}; expected {expected}")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
