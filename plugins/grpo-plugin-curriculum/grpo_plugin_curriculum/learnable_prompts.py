"""A sampler that selects prompts by their expected success rate and skips the others."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

import grpo_core as grpo
from grpo_core.kit import typed
from grpo_plugin_curriculum.weighted import Observing


@define(eq=False)
class Rates:
    """The success rate of each prompt of a task, as a Beta distribution whose evidence decays.

    The weight of a group's evidence halves every ``half_life`` steps.  A group that is observed late counts
    as if it had been observed in time, so the order has no effect.
    """

    size: int
    half_life: float
    successes: NDArray[np.float32] = field(init=False)
    failures: NDArray[np.float32] = field(init=False)
    at: NDArray[np.int32] = field(init=False)
    """Step that the evidence has been decayed to."""
    total: list[float] = field(init=False, factory=lambda: [0.0, 0.0, 0.0])
    """Successes and failures over all prompts of the task, and the step that they have been decayed to."""

    def __attrs_post_init__(self) -> None:
        self.successes = np.zeros(self.size, np.float32)
        self.failures = np.zeros(self.size, np.float32)
        self.at = np.zeros(self.size, np.int32)

    def observe(self, index: int, successes: int, failures: int, step: int) -> None:
        """Add the evidence of a group generated at ``step``."""
        s, f, at = self._added(
            float(self.successes[index]), float(self.failures[index]), int(self.at[index]),
            successes, failures, step,
        )  # fmt: skip
        self.successes[index], self.failures[index], self.at[index] = s, f, at
        before = self.total
        self.total = list(self._added(before[0], before[1], int(before[2]), successes, failures, step))

    def _added(
        self, s: float, f: float, at: int, successes: int, failures: int, step: int
    ) -> tuple[float, float, float]:
        newest = max(at, step)
        old, new = self._faded(newest - at), self._faded(newest - step)
        return s * old + successes * new, f * old + failures * new, newest

    def _faded(self, steps: float) -> float:
        return float(0.5 ** (max(0.0, steps) / self.half_life))

    def prior(self, strength: float) -> tuple[float, float]:
        """Return the pseudo-counts of successes and failures for any prompt of the task."""
        s, f, _ = self.total
        mean = min(0.65, max(0.35, (s + 1.0) / (s + f + 2.0)))  # an unknown prompt is always tried
        return strength * mean, strength * (1.0 - mean)

    def expected(
        self, indices: Sequence[int], step: int, prior: tuple[float, float]
    ) -> list[tuple[float, float]]:
        """Return the expected success rate p of each prompt, and its expected training signal.

        The signal is the expectation of 4 p (1 - p), the scaled variance of the rewards: 1 at p = 0.5.
        """
        at = np.asarray(indices)
        fade = np.exp2(np.minimum(self.at[at] - step, 0) / self.half_life)
        a = prior[0] + self.successes[at] * fade
        n = a + prior[1] + self.failures[at] * fade
        return list(zip((a / n).tolist(), (4.0 * a * (n - a) / (n * (n + 1.0))).tolist(), strict=True))

    def state(self) -> dict[str, Any]:
        """Return the evidence as JSON values; unobserved prompts are left out."""
        seen = np.flatnonzero(self.successes + self.failures).astype(np.int32)
        arrays = (seen, self.successes[seen], self.failures[seen], self.at[seen])
        packed = [base64.b64encode(each.tobytes()).decode() for each in arrays]
        return {"size": self.size, "evidence": packed, "total": self.total}

    @classmethod
    def of(cls, state: SavedEvidence, half_life: float) -> Rates:
        rates = cls(state.size, half_life)
        kinds = (np.int32, np.float32, np.float32, np.int32)
        seen, *evidence = (
            np.frombuffer(base64.b64decode(each), kind)
            for each, kind in zip(state.evidence, kinds, strict=True)
        )
        rates.successes[seen], rates.failures[seen], rates.at[seen] = evidence
        rates.total = list(state.total)
        return rates


@frozen
class SavedEvidence:
    """The state of ``Rates``."""

    size: typed.Count
    evidence: Sequence[str]
    total: tuple[float, float, float]


@frozen
class SavedPrompts:
    """The state of ``LearnablePrompts``, without its random state."""

    rates: Mapping[str, SavedEvidence]
    drawn_at: Mapping[str, Mapping[str, tuple[typed.Count, typed.Count]]]


@define(eq=False, slots=False)
class LearnablePrompts(Observing):
    """Draws the prompts whose success is least certain, and skips prompts with little training signal.

    Tasks are drawn in proportion to their weights.  The sampler looks at the next prompts of the epoch.  A
    prompt with an expected signal of at least ``enough`` is drawn; the others are skipped, unless too few
    remain, in which case the best of them are drawn.  Each prompt is drawn or skipped once an epoch.
    Evidence decays, so prompts that were always or never solved are tried again.

    Args:
        enough: a prompt is drawn if the expectation of 4 p (1 - p) is at least this, where p is its success
            rate.  0.6 is reached between success rates of 19% and 81%.
        candidates: largest number of prompts to consider for each drawn one.
        half_life: number of steps after which the weight of evidence halves.
        prior: weight of the task's mean success rate for each prompt, in rollouts.

    Raises:
        ConfigError: a number is out of range, or a weight names an unknown task.
    """

    name = "learnable_prompts"
    needs_places = True

    @property
    def looks_at(self) -> int:
        """Number of prompts that are taken at most for each that is returned."""
        return self.candidates

    enough: float = 0.6
    candidates: int = 4
    half_life: float = 25.0
    prior: float = 2.0
    _rates: dict[str, Rates] = field(init=False, factory=dict)
    _drawn_at: dict[str, dict[str, list[int]]] = field(init=False, factory=dict)
    """Index of each prompt in flight and how often it is in flight, by task and id."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        positive = 0 < self.half_life < np.inf and 0 < self.prior < np.inf
        if not (0 <= self.enough <= 1 and self.candidates >= 1 and positive):
            raise grpo.ConfigError(
                "sampler learnable_prompts: expected 0 <= enough <= 1, candidates >= 1, half_life > 0 and "
                f"prior > 0, got enough = {self.enough}, candidates = {self.candidates}, half_life = "
                f"{self.half_life}, prior = {self.prior}"
            )

    def sample(self, loaders: Mapping[str, grpo.Loader], request: grpo.SampleRequest) -> list[grpo.Prompt]:
        chosen = self.choose(sorted(loaders), request)
        self.drawn += len(chosen)
        now = request.generation_version
        picked = {
            task: iter(self._pick(task, loaders[task], count, now)) for task, count in Counter(chosen).items()
        }
        return [next(picked[task]) for task in chosen]

    def _pick(self, task: str, loader: grpo.Loader, count: int, now: int) -> list[grpo.Prompt]:
        """Return ``count`` of the next prompts of a task, in the epoch's order; skip the others."""
        rates = self._rates.get(task)
        if rates is None or rates.size != len(loader):
            rates = self._rates[task] = Rates(len(loader), self.half_life)
        prior = rates.prior(self.prior)
        taken: list[grpo.Prompt] = []
        expected: list[tuple[float, float]] = []
        good = 0
        while good < count and len(taken) < count * self.candidates:
            prompts = loader.take(min(count - good, count * self.candidates - len(taken)))
            taken += prompts
            found = rates.expected([loader.place(prompt) for prompt in prompts], now, prior)
            expected += found
            good += sum(value >= self.enough for _, value in found)
        best = sorted(range(len(taken)), key=lambda i: -expected[i][1])[:count]
        chosen = set(best)
        for i, prompt in enumerate(taken):
            if i not in chosen:
                loader.skip(prompt, f"success rate {expected[i][0]:.2f}")
        drawn = [taken[i] for i in sorted(best)]
        on_their_way = self._drawn_at.setdefault(task, {})
        for prompt in drawn:
            on_their_way.setdefault(prompt.id, [loader.place(prompt), 0])[1] += 1
        return drawn

    def observe(self, groups: Sequence[grpo.Group]) -> None:
        """Add the evidence of groups."""
        for group in groups:
            task, id = group.prompt.environment, group.prompt.id
            entry = self._drawn_at.get(task, {}).get(id)
            if entry is None:
                continue  # observed before
            filtered = all(rollout.advantage is None for rollout in group.rollouts)
            if not filtered:  # ``untrained`` reports filtered groups next
                self._arrived(task, id)
            done = group.successes(self._success)
            self._rates[task].observe(entry[0], sum(done), len(done) - sum(done), group.generation_version)

    def untrained(self, prompt: grpo.Prompt, target_version: int) -> None:
        super().untrained(prompt, target_version)
        self._arrived(prompt.environment, prompt.id)

    def _arrived(self, task: str, id: str) -> None:
        """Remove one of a prompt's groups in flight."""
        entry = self._drawn_at.get(task, {}).get(id)
        if entry is not None:
            entry[1] -= 1
            if not entry[1]:
                del self._drawn_at[task][id]

    def state_dict(self) -> dict[str, Any]:
        rates = {task: its.state() for task, its in self._rates.items()}
        return {**super().state_dict(), "rates": rates, "drawn_at": self._drawn_at}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        found = typed.checked(state, SavedPrompts)
        self._rates = {task: Rates.of(its, self.half_life) for task, its in found.rates.items()}
        self._drawn_at = {
            task: {id: list(entry) for id, entry in its.items()} for task, its in found.drawn_at.items()
        }
