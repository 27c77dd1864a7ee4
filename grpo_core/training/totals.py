"""Reduces the per-token metrics of a step to one number each."""

from __future__ import annotations

import operator
from collections import Counter

import numpy as np
from torch import Tensor

from grpo_core.losses.clipped import LARGEST_LOG_RATIO
from grpo_core.training.ranks import Ranks


class Totals:
    """Reduces the per-token metrics of a step to one number each, with one read from the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, int] = {}
        self._events: dict[str, int] = {}

    def add(self, metrics: dict[str, Tensor]) -> None:
        """Add tensors [N]; a name that ends in ``_max`` is a maximum, all others are means."""
        for name, values in metrics.items():
            values = values.detach()
            here = values.max() if name.endswith("_max") else values.sum()
            if name not in self._sums:
                self._sums[name], self._counts[name] = here, 0
            elif name.endswith("_max"):
                self._sums[name] = self._sums[name].maximum(here)
            else:
                self._sums[name] = self._sums[name] + here
            self._counts[name] += values.numel()

    def count(self, name: str, n: int) -> None:
        """Count an exceptional event; without one there is no metric."""
        if n:
            self._events[name] = self._events.get(name, 0) + n

    def sum(self, name: str) -> float:
        """Return the sum of a metric so far; 0 if there was none."""
        return float(self._sums[name]) if name in self._sums else 0.0

    def metrics(self, ranks: Ranks) -> dict[str, float]:
        """Return the metrics over the rows of all ranks."""
        sums = {name: float(total) for name, total in self._sums.items()}
        mine: tuple[dict[str, float], dict[str, int], dict[str, int]] = (sums, self._counts, self._events)
        read: dict[str, float] = {}
        counts: Counter[str] = Counter()
        events: Counter[str] = Counter()
        for its_sums, its_counts, its_events in ranks.gathered(mine):
            for name, value in its_sums.items():
                both = np.maximum if name.endswith("_max") else operator.add  # a maximum with NaN is NaN
                read[name] = float(both(read[name], value)) if name in read else value
            counts.update(its_counts)
            events.update(its_events)
        means = {n: v if n.endswith("_max") else v / counts[n] for n, v in read.items()}
        if (square := means.pop(_SQUARE, None)) is not None:
            size = means["importance_ratio_mean"] ** 2 / square
            means["effective_sample_size"] = min(1.0, size)  # rounding may take it above
        pushed, wanted = means.pop(_PUSHED, 0.0), means.pop(_WANTED, 0.0)
        if wanted:
            means["signal"] = pushed / wanted
        return means | {name: float(n) for name, n in events.items()}


_SQUARE = "importance_ratio/square"
_PUSHED, _WANTED = "signal/pushed", "signal/wanted"


def signal(gradient: Tensor, advantages: Tensor, weights: Tensor) -> dict[str, Tensor]:
    """Compute the size of each token's logprob gradient, and the size that its advantage implies.

    The metric ``signal`` is the sum over the tokens as a share of the same sum for the plain policy gradient,
    - A log policy, without corrections, clipping or dropped tokens.
    """
    return {_PUSHED: gradient.abs(), _WANTED: (advantages * weights).abs()}


def off_policy(start: Tensor, generation: Tensor) -> dict[str, Tensor]:
    """Compute the distance of the step's first weights from the weights that generated.

    ``mismatch_kl`` is KL(generation, start), estimated by k3 = r - 1 - log r, r = start / generation, on
    tokens that the generation policy sampled; the ratios are not capped.
    """
    log_ratio = start - generation
    ratio = log_ratio.clamp(max=LARGEST_LOG_RATIO).exp()
    return {
        "logprob_diff_mean": log_ratio.abs(),
        "mismatch_kl": ratio - 1 - log_ratio,
        "importance_ratio_mean": ratio,
        "importance_ratio_max": ratio,
        _SQUARE: ratio.square(),
    }
