"""Whether training is healthy: thresholds for metrics, and held-out prompts that get worse.  Pure."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf, sqrt
from statistics import fmean, median

from attrs import define, evolve, field, frozen

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


# ---------------------------------------------------------------------------------- held-out prompts

SURELY = 4.0
"""Standard errors by which validation has to fall.  About one in a hundred runs falls so far by chance alone,
with 50 validations of 8 or 200 prompts each, and fewer with fewer validations."""
FEWEST = 8
"""Smallest number of held-out prompts that show anything."""
NORMAL = 1.96
"""Half the width of an interval of 95% in standard errors."""
STILL = 0.3
"""Share of the range of the training rewards by which they may fall and count as unchanged."""


@frozen(kw_only=True)
class Validation:
    """A measurement of held-out prompts."""

    step: int
    value: float
    variance: float
    """Variance of the mean over the prompts."""
    prompts: float


@frozen(kw_only=True)
class Fall:
    """A task whose held-out prompts get worse while its training prompts do not."""

    task: str
    metric: str
    best: float
    step: int
    """The last version of the best validations."""
    last: float
    trained: tuple[float, float]
    """Mean reward in training at that time, and now."""

    @property
    def message(self) -> str:
        before, now = self.trained
        return (
            f"task {self.task!r}: validation {self.metric} fell from {self.best:.3g} (version {self.step}) "
            f"to {self.last:.3g}, and the reward in training went from {before:.3g} to {now:.3g}: the "
            "held-out prompts are unlike the training prompts, or these are learned by heart. Shuffle "
            "prompts with a seed before you split them, and keep the best checkpoint (checkpoint.best = "
            f'"validation/{self.task}/{self.metric}")'
        )


@define
class Trend:
    """Compares the validations of each task with its rewards in training."""

    _steps: dict[str, array[int]] = field(init=False, factory=lambda: defaultdict(partial(array, "q")))
    """Steps with rewards of each task, as numbers alone: a run may have a million steps."""
    _rewards: dict[str, array[float]] = field(init=False, factory=lambda: defaultdict(partial(array, "d")))
    """Its reward in each of them."""
    _measured: dict[tuple[str, str], list[Validation]] = field(init=False, factory=dict)

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, Fall | None]:
        """Take the metrics of a step or a validation; return what each validated task shows now."""
        found: dict[str, Fall | None] = {}
        for name, value in metrics.items():
            first, _, rest = name.partition("/")
            task, _, metric = rest.rpartition("/")
            if first == "reward":
                self._steps[rest].append(step)
                self._rewards[rest].append(value)
            elif first == "validation" and metric in ("accuracy", "reward"):
                low, high = (metrics.get(f"{name}_{end}", value) for end in ("low", "high"))
                validation = Validation(
                    step=step,
                    value=value,
                    variance=((high - low) / (2 * NORMAL)) ** 2,
                    prompts=metrics.get(f"{first}/{task}/prompts", inf),
                )
                self._measured.setdefault((task, metric), []).append(validation)
                found[task] = found.get(task) or self._fall(task, metric)
        return found

    def _fall(self, task: str, metric: str) -> Fall | None:
        """Compare the last third of the validations with the best window of the same length before it."""
        measured, rewards = self._measured[task, metric], self._rewards[task]
        width = max(1, len(measured) // 3)
        prompts = min(each.prompts for each in measured)
        if len(measured) < 2 or prompts < FEWEST or not rewards:
            return None
        windows = [measured[i : i + width] for i in range(len(measured) - 2 * width + 1)]
        best, last = max(windows, key=_mean), measured[-width:]
        fell = _mean(best) - _mean(last)
        # n prompts that all agree have an interval of no width, and still prove no more than n prompts can
        least = fell**2 / (4 * prompts)
        error = sqrt((sum(each.variance for each in (*best, *last)) / width + least) / width)
        before = rewards[: bisect_right(self._steps[task], best[-1].step)][-WINDOW:]
        trained = fmean(before or rewards[:WINDOW]), fmean(rewards[-WINDOW:])
        if fell <= 0 or fell < SURELY * error:
            return None
        if trained[1] < trained[0] - STILL * (max(rewards) - min(rewards)):
            return None
        return Fall(
            task=task,
            metric=metric,
            best=_mean(best),
            step=best[-1].step,
            last=_mean(last),
            trained=trained,
        )


def _mean(validations: Sequence[Validation]) -> float:
    return fmean(each.value for each in validations)
