"""Limits of the metrics that show whether training still works as intended.  Pure.

Each metric has a soft limit (a warning) and a hard limit (the run stops), which apply to the median of the
last steps: a small batch may be extreme once, but a fault persists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from attrs import frozen

WINDOW = 5
"""Number of steps in the median."""


@frozen
class Limits:
    """The limits for a warning (``soft``) and for the end of the run (``hard``); 0 disables a limit."""

    soft: float = 0.0
    hard: float = 0.0


@frozen
class Cause:
    """The meaning of a metric beyond its limit."""

    means: str
    likely: str
    small_is_bad: bool = False


@frozen(kw_only=True)
class Finding:
    """A metric beyond a limit."""

    metric: str
    value: float
    """Median of the metric over the last steps."""
    limit: float
    fatal: bool
    message: str


CAUSES: Mapping[str, Cause] = {
    "logprob_diff_mean": Cause(
        "the engine and the trainer disagree about the sampled tokens",
        "the policy moves fast (lower trainer.lr or pipeline.max_staleness); the engine computes in a "
        "narrower dtype, or samples with another temperature or a top-p that its logprobs do not show",
    ),
    "mismatch_kl": Cause(
        "the policy that is trained is far from the one that generated",
        "steps are too large (lower trainer.lr or trainer.updates_per_step), or rollouts too old (lower "
        "pipeline.max_staleness)",
    ),
    "effective_sample_size": Cause(
        "a few tokens carry the whole gradient",
        "rollouts are too old or steps too large (lower pipeline.max_staleness or trainer.lr), or the "
        "engine's logprobs are wrong",
        small_is_bad=True,
    ),
    "clip_fraction_low": Cause(
        "the clip removes most of the gradient of bad tokens",
        "steps are too large: lower trainer.lr or trainer.updates_per_step",
    ),
    "clip_fraction_high": Cause(
        "the clip removes most of the gradient of good tokens",
        "steps are too large: lower trainer.lr or trainer.updates_per_step",
    ),
}
"""Explanation of each metric that has limits."""


def check_limits(recent: Sequence[Mapping[str, float]], limits: Mapping[str, Limits]) -> list[Finding]:
    """Return the metrics of the last steps (newest last) that are beyond a limit; the fatal ones come first.

    A metric that is not finite is beyond every limit that is set.  A metric that the newest step lacks is
    skipped: a batch without rows says nothing.
    """
    found = []
    for metric, limit in limits.items():
        if not recent or metric not in recent[-1]:
            continue
        cause = CAUSES[metric]
        values = [metrics[metric] for metrics in list(recent)[-WINDOW:] if metric in metrics]
        value = median(values) if all(map(math.isfinite, values)) else math.nan
        for bound, fatal in ((limit.hard, True), (limit.soft, False)):
            if bound and not (value >= bound if cause.small_is_bad else value <= bound):
                found.append(_finding(metric, value, bound, fatal, cause))
                break
    return sorted(found, key=lambda finding: not finding.fatal)


def _finding(metric: str, value: float, bound: float, fatal: bool, cause: Cause) -> Finding:
    side, kind = "below" if cause.small_is_bad else "above", "hard" if fatal else "soft"
    message = (
        f"{metric} is {value:.3g}, {side} its {kind} limit {bound:g}: {cause.means}. Likely: {cause.likely}"
    )
    return Finding(metric=metric, value=value, limit=bound, fatal=fatal, message=message)
