"""The built-in validation strategies.

Each strategy scores every prompt separately, from its scored rollouts, and reports for each task the mean
over its prompts with a bootstrap interval.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from statistics import fmean
from typing import Any, Literal

from attrs import evolve

from grpo_core.contracts.errors import ConfigError
from grpo_core.contracts.playing import derive_seed
from grpo_core.contracts.protocols import ValidationContext
from grpo_core.contracts.records import Rollout
from grpo_core.loop.metrics import accuracy, accuracy_finished, completion_tokens, feedback_means, truncated
from grpo_core.processes.aio import gather
from grpo_core.validation.estimates import MANY, mean_with_interval
from grpo_core.validation.results import SHARES

Mode = Literal["batched", "pipelined"]


class ScoringStrategy:
    """Plays ``n`` rollouts of each prompt, and returns the mean over prompts of ``scores``.

    Metrics of each task: the metrics of ``scores`` (``accuracy`` only where a success is declared), each with
    ``_low`` and ``_high``; ``feedback_PART`` for each metric that the environment returns;
    ``completion_tokens``; ``truncated``, the share that a token limit cut off; ``accuracy_finished``, if
    successes were cut off: the accuracy without them; ``prompts``, the number of prompts that count;
    ``errors``, the number of unscored rollouts.

    Unscored rollouts are not a random sample: a judge that times out on long replies drops the long ones.  So
    the interval of a share covers all possible scores of them, from all failures to all successes.  If they
    could move it by more than 5%, only the interval is reported; a reward, whose range is unknown, is not
    reported then.

    Raises ConfigError if an option is out of its range.

    Args:
        n: number of rollouts of each prompt.
        temperature: sampling temperature; 0 is greedy decoding.
        max_tokens: largest number of tokens of a completion.  None: as in training.
        mode: ``"batched"`` plays all rollouts turn by turn, with one environment call a turn for the
            unfinished ones.  ``"pipelined"`` lets each rollout continue as soon as it can; the environment's
            batching merges calls that arrive together.
        confidence: probability that an interval covers the value, between 0 and 1.
    """

    needed: int = 1
    """Smallest number of scored rollouts for a prompt to count."""
    needs_success: bool = False
    """Whether the strategy measures nothing for a task that declares no ``success``."""

    def __init__(
        self,
        n: int = 1,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        mode: Mode = "batched",
        confidence: float = 0.95,
    ) -> None:
        _expect(n >= 1, "n", n, "at least 1")
        _expect(temperature >= 0, "temperature", temperature, "0 or more")
        _expect(max_tokens is None or max_tokens >= 1, "max_tokens", max_tokens, "at least 1")
        _expect(0 < confidence < 1, "confidence", confidence, "within 0 and 1")
        self.n, self.temperature, self.max_tokens = n, float(temperature), max_tokens
        self.mode, self.confidence = mode, float(confidence)

    def scores(self, rollouts: Sequence[Rollout]) -> Mapping[str, float]:
        """Return the scores of one prompt from its scored rollouts, at least ``needed`` of them."""
        return {**accuracy(rollouts), "reward": fmean(map(_reward, rollouts))}

    async def validate(self, context: ValidationContext) -> dict[str, dict[str, float]]:
        tasks = sorted(context.prompts)
        return dict(zip(tasks, await gather(self._measure(context, task) for task in tasks), strict=True))

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
        groups = [rollouts[i : i + self.n] for i in range(0, len(rollouts), self.n)]
        scored = list(filter(_is_scored, rollouts))
        counted = [judged for each in groups if len(judged := list(filter(_is_scored, each))) >= self.needed]
        errors = len(rollouts) - len(scored)
        few = errors <= MANY * len(rollouts)
        if self.needs_success and any(rollout.success is None for rollout in scored):
            raise ConfigError(
                f"task {task!r}: {type(self).__name__} has to know which reward is a success, and its "
                f"environment declares none; set tasks.{task}.success, or `success` in the environment"
            )
        values = _by_name(self.scores(judged) for judged in counted)
        lows, highs = values, values
        if errors and scored:
            lows, highs = (
                _by_name(self.scores(self.supposed(each, scored, success=success)) for each in groups)
                for success in (False, True)
            )
        seed = derive_seed("bootstrap", task)
        summary: dict[str, float] = {}
        for name in lows:
            share = name.startswith(SHARES)
            if share or few:
                summary |= mean_with_interval(
                    name,
                    values.get(name, ()),
                    seed=seed,
                    confidence=self.confidence,
                    lows=lows[name],
                    highs=highs[name],
                    limit=MANY if share else inf,
                )
        if not errors and any(rollout.success and rollout.truncated for rollout in scored):
            summary |= accuracy_finished(scored)
        summary |= feedback_means(scored) if few else {}
        if ended := [rollout for rollout in rollouts if not rollout.lost]:
            summary |= {"completion_tokens": completion_tokens(ended), "truncated": truncated(ended)}
        return summary | {"prompts": float(len(counted)), "errors": float(errors)}

    def supposed(
        self, rollouts: Sequence[Rollout], scored: Sequence[Rollout], *, success: bool
    ) -> Sequence[Rollout]:
        """Return the rollouts of a prompt with each unscored one as a failure, or as a success.

        Args:
            rollouts: of the prompt.
            scored: all scored rollouts of the task, whose worst or best reward is used.
            success: whether they are successes.
        """
        end = (max if success else min)(scored, key=_reward)
        outcome = None if end.success is None else success
        return [
            each if _is_scored(each) else evolve(each, reward=end.reward, success=outcome, error=None)
            for each in rollouts
        ]


class Batched(ScoringStrategy):
    """Plays rollouts turn by turn: one environment call a turn for all unfinished episodes of a task."""

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
    """Lets each rollout continue as soon as it can; environment calls that arrive together are merged."""

    played: Mode = "pipelined"


class Greedy(ScoringStrategy):
    """Plays one rollout of each prompt, always with the likeliest token."""

    def __init__(
        self, max_tokens: int | None = None, mode: Mode = "batched", confidence: float = 0.95
    ) -> None:
        super().__init__(1, 0.0, max_tokens, mode, confidence)


# ---------------------------------------------------------------------------------- of rollouts


def _reward(rollout: Rollout) -> float:
    assert rollout.reward is not None
    return rollout.reward


def _is_scored(rollout: Rollout) -> bool:
    return rollout.reward is not None


def _by_name(scores: Iterable[Mapping[str, float]]) -> dict[str, list[float]]:
    """Return the values of each score, one for each prompt."""
    values: dict[str, list[float]] = defaultdict(list)
    for of_prompt in scores:
        for name, value in of_prompt.items():
            values[name].append(value)
    return values


# ---------------------------------------------------------------------------------- of options


def _expect(holds: bool, option: str, given: Any, expected: str) -> None:
    if not holds:
        raise ConfigError(f"{option} is {given!r}; expected {expected}")
