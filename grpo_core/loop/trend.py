"""Finds held-out prompts that get worse while training prompts do not.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf, sqrt
from statistics import fmean

from attrs import define, field, frozen

from grpo_core.loop.health import WINDOW

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

    _rewards: dict[str, list[tuple[int, float]]] = field(init=False, factory=dict)
    _measured: dict[tuple[str, str], list[Validation]] = field(init=False, factory=dict)

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, Fall | None]:
        """Take the metrics of a step or a validation; return what each validated task shows now."""
        found: dict[str, Fall | None] = {}
        for name, value in metrics.items():
            first, _, rest = name.partition("/")
            task, _, metric = rest.rpartition("/")
            if first == "reward":
                self._rewards.setdefault(rest, []).append((step, value))
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
        measured, rewards = self._measured[task, metric], self._rewards.get(task, [])
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
        before = [reward for step, reward in rewards if step <= best[-1].step][-WINDOW:]
        values = [reward for _, reward in rewards]
        trained = fmean(before or values[:WINDOW]), fmean(values[-WINDOW:])
        if fell <= 0 or fell < SURELY * error:
            return None
        if trained[1] < trained[0] - STILL * (max(values) - min(values)):
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
