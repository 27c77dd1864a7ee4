"""Thresholds for the metrics that show whether training is healthy.  Pure.

Each metric has a soft limit (a warning) and a hard limit (the run stops), which apply to the median of the
last steps: a small batch may be extreme once, but a fault persists.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from attrs import evolve, frozen

WINDOW = 5
"""Number of recent steps for the median and for warnings."""


@frozen
class Thresholds:
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


OFF_POLICY = ("logprob_diff_mean", "mismatch_kl", "effective_sample_size")
"""Metrics of the distance between the policy and the generation policy."""


def check_limits(
    recent: Sequence[Mapping[str, float]], limits: Mapping[str, Thresholds], uncorrected: str = ""
) -> list[Finding]:
    """Return the metrics of the last steps (newest last) that are beyond a limit; the fatal ones come first.

    A metric that is not finite is beyond every limit that is set.  A metric that the newest step lacks is
    skipped, as for a batch without rows.

    Args:
        recent: metrics of the last steps.
        limits: by metric.
        uncorrected: why the loss does not correct for older weights; empty if it does.
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
                if uncorrected and metric in OFF_POLICY:
                    cause = evolve(cause, likely=uncorrected)
                found.append(_finding(metric, value, bound, fatal, cause))
                break
    return sorted(found, key=lambda finding: not finding.fatal)


NO_SIGNAL, LITTLE_SIGNAL = 0.02, 0.1
"""Fractions of the signal: below the first a step is lost; below the second, in the median, gradients are
many times smaller than the advantages imply.  Weights near 1 keep nearly all of it, and a loss that trains a
fifth of the tokens keeps a fifth."""


def lost_signal(recent: Sequence[Mapping[str, float]], correction: str) -> list[Finding]:
    """Return a warning if almost none of the advantages' signal reaches the gradient.

    Args:
        recent: metrics of the last steps, newest last.
        correction: the options of the loss that correct for older weights, as text.
    """
    if not recent or "signal" not in recent[-1]:
        return []
    newest = recent[-1]
    value = median([metrics["signal"] for metrics in list(recent)[-WINDOW:] if "signal" in metrics])
    lost = min(newest["signal"], newest.get("importance_weight_mean", 1.0))
    if lost < NO_SIGNAL:
        value, what = lost, "the step trained nearly nothing"
    elif value < LITTLE_SIGNAL:
        what = f"the gradient is about {1 / value:.0f} times smaller than the advantages ask for"
    else:
        return []
    seen = ("importance_weight_mean", "clip_fraction_low", "clip_fraction_high", *OFF_POLICY)
    measured = ", ".join(f"{name} {newest[name]:.3g}" for name in seen if name in newest)
    message = (
        f"{what}: {value:.2%} of the rewards' signal remains after the loss ({correction or 'its options'}"
        f"; measured: {measured}). Choose a correction by tokens (token_truncate), a wider bound, or "
        "rollouts of newer weights (pipeline.max_staleness, trainer.lr)"
    )
    return [Finding(metric="signal", value=value, fatal=False, message=message)]


def _finding(metric: str, value: float, bound: float, fatal: bool, cause: Cause) -> Finding:
    side, kind = "below" if cause.small_is_bad else "above", "hard" if fatal else "soft"
    message = (
        f"{metric} is {value:.3g}, {side} its {kind} limit {bound:g}: {cause.means}. Likely: {cause.likely}"
    )
    return Finding(metric=metric, value=value, fatal=fatal, message=message)
