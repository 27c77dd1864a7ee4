"""A validation strategy that compares each version with the best one so far, on the same prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import sha256
from math import inf
from statistics import fmean
from typing import Any, Literal, get_args
from zlib import crc32

from attrs import asdict, define

from grpo_core import (
    ConfigError,
    Rollout,
    ScoringStrategy,
    ValidationContext,
    mean_with_interval,
)
from grpo_core.kit import typed
from grpo_plugin_algorithms.comparison import Comparison, Decision, decided
from grpo_plugin_algorithms.strategies import Mode

MANY = 0.05
"""Largest share of missing scores of a standard."""
Until = Literal["decided", "all"]

Scores = Mapping[str, Mapping[str, float]]
"""Scores of each prompt, by name."""

SHARES = ("accuracy", "accuracy_low", "accuracy_high")
OUTCOMES = {"better": 1.0, "equal": 0.0, "worse": -1.0}


@define(eq=False)
class Scored:
    """The scores of a version by prompt."""

    version: typed.Count
    scores: dict[str, dict[str, float]]
    """Scores of each prompt that has a scored rollout."""
    missing: dict[str, float]
    """Share of the rollouts that are unscored, of each prompt that lacks some."""

    def ends(self, prompt: str) -> tuple[float, float]:
        """Return the lowest and the highest possible score of a prompt, over all values of missing scores."""
        own, missing = self.scores.get(prompt), self.missing.get(prompt, 0.0)
        if not missing:
            assert own is not None
            return _score(own), _score(own)
        if not any("accuracy" in each for each in self.scores.values()):  # the range of rewards is unknown
            return -inf, inf
        known = 0.0 if own is None else _score(own) * (1 - missing)
        return known, known + missing

    @property
    def share_missing(self) -> float:
        """Share of unscored rollouts."""
        return sum(self.missing.values()) / (len({*self.scores, *self.missing}) or 1)


@define(eq=False)
class Bounds:
    """Two comparisons that bound the effect of missing scores: worst case and best case for a version."""

    low: Comparison
    high: Comparison

    def add(self, one: Scored, other: Scored, prompts: Iterable[str]) -> None:
        """Add the differences of prompts.  Raises ValueError if one exceeds the bound."""
        bound = self.low.bound
        for prompt in prompts:
            ends, its = one.ends(prompt), other.ends(prompt)
            low, high = ends[0] - its[1], ends[1] - its[0]
            self.low.add([-bound if low == -inf else low])
            self.high.add([bound if high == inf else high])

    @property
    def interval(self) -> tuple[float, float]:
        """Smallest and largest mean difference that is not excluded, over all values of missing scores."""
        return self.low.interval[0], self.high.interval[1]

    @property
    def decision(self) -> Decision | None:
        """The result for the first version: better, worse or equal; None while undecided."""
        return decided(self.interval, self.low.margin)


class Paired(ScoringStrategy):
    """Compares each version with the best one so far, and stops as soon as the comparison is decided.

    The score of a prompt is its success rate, or its mean reward where no success is declared.  The first
    validation plays all prompts and is the first standard.  A later version plays a growing part of the
    prompts, in the same order for all versions.  Once it is significantly worse, or equal within ``margin``,
    the remaining prompts are skipped.  A version that is significantly better plays all prompts and becomes
    the standard, which a resume keeps.

    Where prompts are skipped, ``accuracy`` and ``reward`` are estimates for all prompts: the standard's mean
    plus the mean difference on the played prompts.  This makes versions comparable that played different
    prompts.  All other metrics cover the played rollouts only.

    The lower end of an interval assumes the worst value of each missing score, the upper end the best.  A
    version with more than 5% of missing scores does not become the standard.

    Additional metrics of each task: ``difference`` to the standard with ``difference_low`` and
    ``difference_high``, an interval that is valid at every time; ``outcome``: 1 is better, 0 equal, -1 worse,
    absent if undecided; ``standard``: the version of the standard.

    Raises ConfigError if an option is out of its range.

    Args:
        until: ``"decided"`` may skip prompts, ``"all"`` plays all of them.
        batch: number of prompts between two looks at the comparison.
        effect: size of a relevant difference, for which decisions are fastest.
        margin: versions are equal if the interval is within this distance of 0.
        bound: largest difference of two scores of a prompt.
    """

    def __init__(
        self,
        until: Until = "decided",
        batch: int = 32,
        effect: float = 0.05,
        margin: float = 0.02,
        bound: float = 1.0,
        n: int = 1,
        temperature: float = 0.0,
        max_tokens: int | None = None,
        mode: Mode = "batched",
        confidence: float = 0.95,
    ) -> None:
        super().__init__(n, temperature, max_tokens, mode, confidence)
        if until not in get_args(Until) or batch < 1:
            raise ConfigError(
                f"until is {until!r} and batch {batch!r}; expected 'decided' or 'all', and a whole number of "
                "at least 1"
            )
        self._until, self._batch = until, batch
        self._limits: dict[str, float] = {"bound": bound, "effect": effect, "margin": margin}
        try:
            Comparison(confidence=confidence, **self._limits)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self._standards: dict[str, Scored] = {}
        """The standard of each task."""

    def state_dict(self) -> dict[str, Any]:
        """Return the standard of each task."""
        return {task: asdict(standard) for task, standard in self._standards.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the standard of each task."""
        self._standards = typed.checked(state, dict[str, Scored])

    async def _measure(self, context: ValidationContext, task: str) -> dict[str, float]:
        prompts = sorted(context.prompts[task], key=lambda prompt: sha256(prompt.id.encode()).digest())
        standard, scored = self._standards.get(task), Scored(context.version, {}, {})
        one, other = (Comparison(confidence=self.confidence, **self._limits) for _ in range(2))
        comparison = Bounds(one, other)
        played: list[Rollout] = []
        for begin in range(0, len(prompts), self._batch):
            part = prompts[begin : begin + self._batch]
            rollouts = await context.rollout(
                part, n=self.n, temperature=self.temperature, max_tokens=self.max_tokens, mode=self.mode
            )
            played += rollouts
            for index, prompt in enumerate(part):
                own = rollouts[index * self.n : (index + 1) * self.n]
                known = [rollout for rollout in own if rollout.reward is not None]
                if known:
                    scored.scores[prompt.id] = dict(self.scores(known))
                if len(known) < len(own):
                    scored.missing[prompt.id] = 1 - len(known) / len(own)
            if standard is not None:
                there = standard.scores.keys() | standard.missing.keys()
                try:
                    comparison.add(scored, standard, (prompt.id for prompt in part if prompt.id in there))
                except ValueError as error:
                    raise ConfigError(f"task {task!r}: {error}; set validation.options.bound") from None
                if self._until == "decided" and comparison.decision in ("worse", "equal"):
                    break
        few = scored.share_missing <= MANY
        if few and (standard is None or comparison.decision == "better"):
            self._standards[task] = scored
        summary = self._summary(task, played)
        if standard is None:
            return summary
        if few and len(played) < len(prompts) * self.n:
            summary |= self._estimates(task, scored, standard)
        return summary | _described(comparison, standard.version)

    def _estimates(self, task: str, scored: Scored, standard: Scored) -> dict[str, float]:
        """Estimate means over all prompts from the scores of some of them, with confidence intervals."""
        seed = crc32(task.encode())
        estimates: dict[str, float] = {}
        both = [(own, standard.scores[id]) for id, own in scored.scores.items() if id in standard.scores]
        for name in both[0][0] if both else ():
            mean = fmean([scores[name] for scores in standard.scores.values()])
            differences = [own[name] - its[name] for own, its in both]
            moved = mean_with_interval(name, differences, seed=seed, confidence=self.confidence)
            estimates |= {each: mean + value for each, value in moved.items()}
        lacks = scored.share_missing + standard.share_missing
        for name, sign in (("accuracy_low", -1), ("accuracy_high", 1)):
            if name in estimates:
                estimates[name] += sign * lacks
        return {
            name: min(max(value, 0.0), 1.0) if name in SHARES else value for name, value in estimates.items()
        }


def _score(scores: Mapping[str, float]) -> float:
    """Return the score that versions are compared by."""
    return scores.get("accuracy", scores["reward"])


def _described(comparison: Bounds, version: int) -> dict[str, float]:
    low, high = comparison.interval
    mean = (comparison.low.mean + comparison.high.mean) / 2
    metrics = {"difference": mean, "difference_low": low, "difference_high": high}
    if comparison.decision is not None:
        metrics["outcome"] = OUTCOMES[comparison.decision]
    return metrics | {"standard": float(version)}
