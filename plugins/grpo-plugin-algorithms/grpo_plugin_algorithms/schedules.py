"""Learning rates, for ``trainer.lr_schedule``."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt


def by_sample_size(done: float, metrics: Mapping[str, float]) -> float:
    """Scale by the root of the effective sample size (VCPO, arXiv 2602.17616).

    With the ratio w = trainer / engine of each of N tokens, the factor is::

        sqrt(ESS / N),   ESS = (sum w)^2 / sum w^2

    The paper's w is of a rollout.  A step of few useful tokens then moves the weights less.

    Args:
        done: the fraction of updates done.
        metrics: of the step so far; before the first step there are none, and the factor is 1.
    """
    return sqrt(metrics.get("effective_sample_size", 1.0))
