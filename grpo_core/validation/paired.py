"""A validation strategy that compares each version with the best one so far, on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, Literal, TypedDict, get_args

from grpo_core.errors import ConfigError
from grpo_core.loop.turns import derive_seed
from grpo_core.protocols import ValidationContext
from grpo_core.records import Prompt, Rollout
from grpo_core.typed import Count, checked
from grpo_core.validation.comparison import Comparison
from grpo_core.validation.estimates import mean_with_interval
from grpo_core.validation.strategies import Mode, ScoringStrategy

Until = Literal["decided", "all"]

Scores = Mapping[str, Mapping[str, float]]
"""Scores by prompt, by name."""

SHARES = ("accuracy", "accuracy_low", "accuracy_high")
OUTCOMES = {"better": 1.0, "equal": 0.0, "worse": -1.0}


class SavedStandard(TypedDict):
    """The standard of a task in the state of ``Paired``."""

    version: Count
    scores: dict[str, dict[str, float]]


class Paired(ScoringStrategy):
    """Compares each version with the best one so far, and stops when the comparison is decided.

    The score of a prompt is its share of successes, or its mean reward where no success is declared.  The
    first validation plays all prompts and is the first standard.  A later version is played on a growing part
    of the prompts, in an order that is the same for all versions; as soon as it is certainly worse, or equal
    within ``margin``, the rest is left out.  A version that is certainly better is played to the end, and is
    the standard from then on, also after a resume.

    Where prompts are left out, ``accuracy`` and ``reward`` are estimates for all prompts: the standard's
    mean, plus the mean difference on the prompts that were played.  So they can be compared between versions,
    which a mean over other prompts could not.  All other metrics are of the rollouts that were played.

    Metrics of each task, besides those of any strategy: ``difference`` to the standard with
    ``difference_low`` and ``difference_high``, an interval that may be looked at as often as one likes;
    ``outcome``: 1 is better, 0 equal, -1 worse, absent if undecided; ``standard``, the version it was
    compared with.

    Raises ConfigError if an option is out of its range.

    Args:
        until: ``"decided"`` leaves prompts out, ``"all"`` plays them all in any case.
        batch: number of prompts that are played before the comparison is looked at again.
        effect: a difference that matters; decisions about such a difference are fastest.
        margin: versions are equal if their difference is certainly smaller than this.
        bound: no two scores of a prompt differ by more than this.
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
        mode: Mode = "pipelined",
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
        self._standards: dict[str, tuple[int, dict[str, dict[str, float]]]] = {}
        """Version of the standard and its scores by prompt, by task."""

    def state_dict(self) -> dict[str, Any]:
        """Return the standard of each task."""
        return {
            task: {"version": version, "scores": scores}
            for task, (version, scores) in self._standards.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the standards of a run."""
        self._standards = {
            task: (one["version"], {id: dict(scores) for id, scores in one["scores"].items()})
            for task, one in checked(state, dict[str, SavedStandard]).items()
        }

    async def _measure(self, context: ValidationContext, task: str) -> dict[str, float]:
        prompts = sorted(context.prompts[task], key=lambda prompt: derive_seed("paired", task, prompt.id))
        version, standard = self._standards.get(task, (context.version, {}))
        comparison = Comparison(confidence=self.confidence, **self._limits)
        played: list[Rollout] = []
        scores: dict[str, dict[str, float]] = {}
        for begin in range(0, len(prompts), self._batch):
            part = prompts[begin : begin + self._batch]
            rollouts = await self._played(context, part)
            found = self._scores(part, rollouts)
            played += rollouts
            scores |= found
            self._compare(comparison, task, found, standard)
            if self._until == "decided" and comparison.decision in ("worse", "equal"):
                break
        if not standard or comparison.decision == "better":
            self._standards[task] = (context.version, scores)
        summary = self._summary(task, played)
        if not standard:
            return summary
        if len(played) < len(prompts) * self.n:
            summary |= self._estimates(task, scores, standard)
        return summary | _described(comparison, version)

    async def _played(self, context: ValidationContext, prompts: Sequence[Prompt]) -> list[Rollout]:
        return await context.rollout(
            prompts, n=self.n, temperature=self.temperature, max_tokens=self.max_tokens, mode=self.mode
        )

    def _scores(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> dict[str, dict[str, float]]:
        """Return the scores of each prompt that has a scored rollout."""
        found = {}
        for place, prompt in enumerate(prompts):
            own = rollouts[place * self.n : (place + 1) * self.n]
            if scored := [rollout for rollout in own if rollout.reward is not None]:
                found[prompt.id] = dict(self.scores(scored))
        return found

    def _compare(self, comparison: Comparison, task: str, found: Scores, standard: Scores) -> None:
        try:
            comparison.add(_score(found[id]) - _score(standard[id]) for id in found if id in standard)
        except ValueError as error:
            raise ConfigError(f"task {task!r}: {error}; set validation.options.bound") from None

    def _estimates(self, task: str, found: Scores, standard: Scores) -> dict[str, float]:
        """Estimate the means over all prompts from the scores of some of them, with their intervals."""
        seed = derive_seed("bootstrap", task)
        estimates: dict[str, float] = {}
        both = [(scores, standard[id]) for id, scores in found.items() if id in standard]
        for name in both[0][0] if both else ():
            mean = fmean([scores[name] for scores in standard.values()])
            differences = [scores[name] - its[name] for scores, its in both]
            moved = mean_with_interval(name, differences, seed=seed, confidence=self.confidence)
            estimates |= {each: mean + value for each, value in moved.items()}
        return {name: _share(value) if name in SHARES else value for name, value in estimates.items()}


def _score(scores: Mapping[str, float]) -> float:
    """Return the score by which versions are compared."""
    return scores.get("accuracy", scores["reward"])


def _share(value: float) -> float:
    return min(max(value, 0.0), 1.0)


def _described(comparison: Comparison, version: int) -> dict[str, Any]:
    low, high = comparison.interval
    told = {"difference": comparison.mean, "difference_low": low, "difference_high": high}
    decision = comparison.decision
    return {
        **told,
        **({} if decision is None else {"outcome": OUTCOMES[decision]}),
        "standard": float(version),
    }
