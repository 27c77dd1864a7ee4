"""A validation strategy that compares each version with the best one so far, on the same prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from grpo_core.errors import ConfigError
from grpo_core.loop.turns import derive_seed
from grpo_core.protocols import ValidationContext
from grpo_core.records import Prompt, Rollout
from grpo_core.validation.comparison import Comparison
from grpo_core.validation.strategies import Mode, ScoringStrategy

Until = Literal["decided", "all"]

OUTCOMES = {"better": 1.0, "equal": 0.0, "worse": -1.0}


class Paired(ScoringStrategy):
    """Compares each version with the best one so far, and stops when the comparison is decided.

    The score of a prompt is its share of successes, or its mean reward where no success is declared.  The
    first validation plays all prompts and is the first standard.  A later version is played on a growing part
    of the prompts, in an order that is the same for all versions; as soon as it is certainly worse, or equal
    within ``margin``, the rest is left out.  A version that is certainly better is played to the end, and is
    the standard from then on, also after a resume.

    Metrics of each task, besides those of the rollouts that were played: ``difference`` to the standard with
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
        self._standards: dict[str, tuple[int, dict[str, float]]] = {}
        """Version of the standard and its score by prompt, by task."""

    def state_dict(self) -> dict[str, Any]:
        """Return the standard of each task."""
        return {
            task: {"version": version, "scores": scores}
            for task, (version, scores) in self._standards.items()
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with the standards of a run."""
        self._standards = {task: (one["version"], dict(one["scores"])) for task, one in state.items()}

    async def _measure(self, context: ValidationContext, task: str) -> dict[str, float]:
        prompts = sorted(context.prompts[task], key=lambda prompt: derive_seed("paired", task, prompt.id))
        version, standard = self._standards.get(task, (context.version, {}))
        comparison = Comparison(confidence=self.confidence, **self._limits)
        played: list[Rollout] = []
        scores: dict[str, float] = {}
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
        return summary if not standard else summary | _described(comparison, version)

    async def _played(self, context: ValidationContext, prompts: Sequence[Prompt]) -> list[Rollout]:
        return await context.rollout(
            prompts, n=self.n, temperature=self.temperature, max_tokens=self.max_tokens, mode=self.mode
        )

    def _scores(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the score of each prompt that has a scored rollout."""
        found = {}
        for place, prompt in enumerate(prompts):
            own = rollouts[place * self.n : (place + 1) * self.n]
            if scored := [rollout for rollout in own if rollout.reward is not None]:
                values = self.scores(scored)
                found[prompt.id] = values.get("accuracy", values["reward"])
        return found

    def _compare(
        self, comparison: Comparison, task: str, found: Mapping[str, float], standard: Mapping[str, float]
    ) -> None:
        try:
            comparison.add(found[name] - standard[name] for name in found if name in standard)
        except ValueError as error:
            raise ConfigError(f"task {task!r}: {error}; set validation.options.bound") from None


def _described(comparison: Comparison, version: int) -> dict[str, Any]:
    low, high = comparison.interval
    told = {"difference": comparison.mean, "difference_low": low, "difference_high": high}
    decision = comparison.decision
    return {
        **told,
        **({} if decision is None else {"outcome": OUTCOMES[decision]}),
        "standard": float(version),
    }
