"""Validation strategies that play each prompt several times: pass@k and majority vote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from statistics import fmean
from typing import Any, Literal

from attrs import evolve

from grpo_core import ConfigError, Rollout, ScoringStrategy

Mode = Literal["batched", "pipelined"]


class PassAtK(ScoringStrategy):
    """Measures ``pass@k``: how often at least one of ``k`` rollouts is a success (Chen et al. 2021).

    The estimate is unbiased.  A prompt with fewer than ``k`` scored rollouts is left out; an ``n`` above
    ``k`` reduces the variance and tolerates unscored rollouts.

    Args:
        k: number of rollouts of which at least one must be a success, or a list of such numbers.
        n: number of rollouts of each prompt.  None: the largest ``k``.
    """

    needs_success = True

    def __init__(
        self,
        k: int | Sequence[int] = 8,
        n: int | None = None,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        mode: Mode = "batched",
        confidence: float = 0.95,
    ) -> None:
        several: list[Any] = list(k) if isinstance(k, list | tuple) else [k]
        if not several or not all(type(each) is int and each >= 1 for each in several):
            raise ConfigError(f"k is {k!r}; expected whole numbers of at least 1")
        self.k: list[int] = sorted(set(several))
        super().__init__(self.k[-1] if n is None else n, temperature, max_tokens, mode, confidence)
        if self.n < self.k[-1]:
            raise ConfigError(f"n is {n!r}; expected at least the largest k, {self.k[-1]}")
        _expect_variety(self)
        self.needed = self.k[-1]

    def scores(self, rollouts: Sequence[Rollout]) -> Mapping[str, float]:
        n, correct = len(rollouts), round(sum(map(_correct, rollouts)))
        return {f"pass@{k}": pass_at_k(n, correct, k) for k in self.k} | dict(super().scores(rollouts))


class Majority(ScoringStrategy):
    """Measures ``maj@n``: how often the most frequent answer of ``n`` rollouts is right (Wang et al. 2022).

    The environment reports the answers (``Feedback.answer``); replies without an answer abstain, and
    ``answered`` is the share of the others.  A prompt whose replies all abstain counts as wrong, and a task
    without any answer is refused.  Tied answers count with the mean of their scores.
    """

    needs_success = True

    def __init__(
        self,
        n: int = 8,
        temperature: float = 1.0,
        max_tokens: int | None = None,
        mode: Mode = "batched",
        confidence: float = 0.95,
    ) -> None:
        super().__init__(n, temperature, max_tokens, mode, confidence)
        _expect_variety(self)

    def scores(self, rollouts: Sequence[Rollout]) -> Mapping[str, float]:
        votes = [(str(r.answer), _correct(r)) for r in rollouts if r.answer is not None]
        return {
            f"maj@{self.n}": majority_score(votes) if votes else 0.0,
            **super().scores(rollouts),
        }

    def _summary(self, task: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
        summary = super()._summary(task, rollouts)
        scored = [rollout for rollout in rollouts if rollout.reward is not None]
        answered = sum(rollout.answer is not None for rollout in scored)
        if scored and not answered:
            raise ConfigError(
                f"task {task!r}: majority compares the answers of replies, and its environment names none of "
                f"{len(scored)}; return grpo_core.Feedback(reward=..., answer=...) from its evaluate"
            )
        return summary | ({"answered": answered / len(scored)} if scored else {})

    def supposed(
        self, rollouts: Sequence[Rollout], scored: Sequence[Rollout], *, success: bool
    ) -> Sequence[Rollout]:
        """Assign the most frequent answer of failures, or of successes, to each unscored rollout."""
        answers = [str(r.answer) for r in rollouts if r.success is success and r.answer is not None]
        answer = Counter(answers).most_common(1)[0][0] if answers else "an answer that nobody else gives"
        supposed = super().supposed(rollouts, scored, success=success)
        return [
            each if own.reward is not None else evolve(each, answer=answer)
            for own, each in zip(rollouts, supposed, strict=True)
        ]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Estimate the probability that at least one of ``k`` rollouts is correct, given ``correct`` of ``n``.

    ``1 - C(n - correct, k) / C(n, k)``, which is unbiased for every ``n >= k`` (Chen et al. 2021, "Evaluating
    large language models trained on code", equation 1); ``1 - (1 - correct / n) ** k`` is not.

    Raises ValueError unless ``0 <= correct <= n`` and ``1 <= k <= n``.
    """
    if not (0 <= correct <= n and 1 <= k <= n):
        raise ValueError(f"pass@{k} of {correct} correct in {n}: expected 0 <= correct <= n and 1 <= k <= n")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def majority_score(votes: Sequence[tuple[Hashable, float]]) -> float:
    """Return the value of the answer with the most votes: the mean of its votes' values.

    A tie has the mean value of the tied answers: the expectation of a random choice among them (Wang et al.
    2022, "Self-consistency", leaves ties open).

    Args:
        votes: ``(answer, value)`` for each rollout; at least one.
    """
    values: dict[Hashable, list[float]] = {}
    for answer, value in votes:
        values.setdefault(answer, []).append(value)
    most = max(map(len, values.values()))
    return fmean(fmean(those) for those in values.values() if len(those) == most)


def _correct(rollout: Rollout) -> float:
    return float(bool(rollout.success))


def _expect_variety(strategy: ScoringStrategy) -> None:
    if strategy.n > 1 and not strategy.temperature:
        raise ConfigError("temperature is 0; expected more than 0: greedy rollouts are all the same")
