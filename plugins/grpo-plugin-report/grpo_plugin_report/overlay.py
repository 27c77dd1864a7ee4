"""Charts with the curves of several runs, and tables of their results.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from attrs import field, frozen

from grpo_core.loop.metrics import headline
from grpo_core.validation.results import SHARES
from grpo_plugin_report.arms import Arm, Estimate, difference, estimate
from grpo_plugin_report.charts import Chart, Point, Series, chart
from grpo_plugin_report.curves import (
    ASYNCHRONY,
    GROUPS,
    HEALTH,
    RECENT,
    Plot,
    intervals,
    mean_over_groups,
    measured_in,
    points,
    with_something,
)
from grpo_plugin_report.report import Files
from grpo_plugin_report.values import is_number

PARTS = 60
"""Largest number of points of a curve over the steps; each is the mean of a bin of steps."""
PALETTE = 5
"""Number of colours; arms with the same colour differ in their letters."""
MOST_TASKS = 20
"""Largest number of tasks with charts."""


@frozen(kw_only=True)
class Result:
    """The results of an arm on a task."""

    arm: Arm
    first: Estimate | None
    last: Estimate | None
    gain: Estimate | None
    """Difference of its last validation to the first arm's; None for the first arm."""
    reward: Estimate | None


@frozen(kw_only=True)
class Results:
    """The results of all arms on a task."""

    task: str
    metric: str
    """The metric of the validations; empty if no metric is common to all runs."""
    in_percent: bool
    versions: tuple[float, float] | None
    """The first and the last version that all runs validated."""
    steps: tuple[int, int] | None
    """The steps that rewards are averaged over."""
    rows: Sequence[Result]


# ---------------------------------------------------------------------------------- results


def results(arms: Sequence[Arm], runs: Sequence[Files], task: str) -> Results:
    """Return the results on a task, at versions and steps common to all runs."""
    metric = metric_of(runs, task)
    curves = [dict(_finite(_validations(run, task, metric))) for run in runs]
    common = sorted(set.intersection(*map(set, curves)))
    versions = (common[0], common[-1]) if common else None
    rewards = [dict(_finite(points(run.steps, f"reward/{task}"))) for run in runs]
    steps = _recent(rewards)
    rows = []
    base = [curves[run][versions[1]] for run in arms[0].runs] if versions else []
    for arm in arms:
        last = [curves[run][versions[1]] for run in arm.runs] if versions else []
        rows.append(
            Result(
                arm=arm,
                first=_validated(arm, runs, task, metric, versions and versions[0]),
                last=_validated(arm, runs, task, metric, versions and versions[1]),
                gain=difference(last, base) if arm is not arms[0] else None,
                reward=estimate([y for run in arm.runs for y in _reward(runs[run], task, steps)])
                if steps
                else None,
            )
        )
    return Results(
        task=task,
        metric=metric,
        in_percent=metric.startswith(SHARES),
        versions=versions,
        steps=steps,
        rows=rows,
    )


def metric_of(runs: Sequence[Files], task: str) -> str:
    """Return the main metric of a task among those common to all runs, or an empty text."""
    measured = [measured_in(run.validations).get(task, {}) for run in runs]
    return headline(name for name in measured[0] if all(name in others for others in measured)) or ""


def _validations(run: Files, task: str, metric: str) -> list[Point]:
    return points(run.validations, f"validation/{task}/{metric}") if metric else []


def _validated(
    arm: Arm, runs: Sequence[Files], task: str, metric: str, version: float | None
) -> Estimate | None:
    """Return the result of an arm at a version; a single run has the validation's interval."""
    if version is None:
        return None
    found = estimate([dict(_validations(runs[run], task, metric))[version] for run in arm.runs])
    if found is None or len(arm.runs) > 1:
        return found
    own = intervals(runs[arm.runs[0]].validations, f"validation/{task}/{metric}")
    ends = {x: (low, high) for x, low, high in own}
    return Estimate(mean=found.mean, interval=ends.get(version))


def _reward(run: Files, task: str, steps: tuple[int, int]) -> list[float]:
    """Return the mean reward of a task over the groups of these steps, or None."""
    metric = f"reward/{task}"
    within = {step for step, _ in points(run.steps, metric) if steps[0] <= step <= steps[1]}
    found = mean_over_groups(task, [row for row in run.steps if row.get("step") in within], metric)
    return [] if found is None else [found]


def _recent(rewards: Sequence[Mapping[float, float]]) -> tuple[int, int] | None:
    """Return the last steps, up to the end of the shortest run, in which all runs trained the task."""
    if not all(rewards):
        return None
    last = min(max(curve) for curve in rewards)
    first = max(min(min(curve) for curve in rewards), last - RECENT + 1)
    trained = all(any(first <= step <= last for step in curve) for curve in rewards)
    return (int(first), int(last)) if trained else None


SPEED = (
    ("seconds of a step", "time/step", False),
    ("tokens generated in a second", "tokens_per_second/generation", False),
    ("tokens trained in a second", "tokens_per_second/training", False),
    ("overlap", "overlap", True),
    ("staleness", "staleness_mean", False),
    ("entropy", "entropy", False),
    ("mismatch_kl", "mismatch_kl", False),
)
"""Columns of the table of speed and health: name, metric, and whether it is shown in percent."""


def speed(arms: Sequence[Arm], runs: Sequence[Files]) -> list[tuple[Arm, list[Estimate | None]]]:
    """Return the means over all steps, for each arm and each of ``SPEED``."""

    def mean(run: int, metric: str) -> list[float]:
        values = [y for _, y in _finite(points(runs[run].steps, metric))]
        return [fmean(values)] if values else []

    return [
        (arm, [estimate([y for run in arm.runs for y in mean(run, metric)]) for _, metric, _ in SPEED])
        for arm in arms
    ]


# ---------------------------------------------------------------------------------- charts


def charts(arms: Sequence[Arm], runs: Sequence[Files], tasks: Sequence[str]) -> list[tuple[str, list[Chart]]]:
    """Return the non-empty charts, in sections with a title."""
    draw = Overlay(arms, runs)
    shown = tasks[:MOST_TASKS]
    learning = []
    for task in shown:
        metric = metric_of(runs, task)
        learning.append(draw.steps(f"{task}: reward in training", f"reward/{task}"))
        learning.append(draw.validations(f"{task}: validation {metric}", task, metric))
    sections = [
        ("Learning", learning),
        ("Groups", [draw.plot(plot, task) for task in shown for plot in GROUPS]),
        ("Asynchrony", [draw.plot(plot) for plot in ASYNCHRONY]),
        ("Health", [draw.plot(plot) for plot in HEALTH]),
    ]
    return with_something(sections)


@frozen
class Overlay:
    """Charts of one metric over all runs: thin lines for seeds, the mean of each arm with its interval."""

    arms: Sequence[Arm]
    runs: Sequence[Files]
    _parts: Callable[[float], float] = field(init=False)
    """Maps a step to the middle of its bin."""

    @_parts.default
    def _parts_of_all(self) -> Callable[[float], float]:
        return _parts([x for run in self.runs for x, _ in points(run.steps, "step")])

    def plot(self, plot: Plot, task: str = "") -> Chart | None:
        """Return the chart of the first metric of a plot."""
        (name, metric), *others = plot.metrics.items()
        title = f"{task}: {plot.title}" if task else f"{plot.title}: {name}" if others else plot.title
        metric = metric.format(task)
        if plot.rare and not any(y for run in self.runs for _, y in points(run.steps, metric)):
            return None
        return self.steps(title, metric, note=plot.note, low=plot.low, high=plot.high, percent=plot.percent)

    def steps(self, title: str, metric: str, **options: Any) -> Chart | None:
        """Return the chart of a metric of the steps, or None if no run has it."""
        curves = [_binned(points(run.steps, metric), self._parts) for run in self.runs]
        return self._chart(title, curves, {}, **options)

    def validations(self, title: str, task: str, metric: str) -> Chart | None:
        """Return the chart of a metric of the validations, or None if no run has it."""
        curves = [_finite(_validations(run, task, metric)) for run in self.runs]
        bounds = {"low": 0, "high": 1, "percent": True} if metric.startswith(SHARES) else {}
        versions = {x for curve in curves for x, _ in curve}
        if len(versions) > PARTS:
            parts = _parts([*versions])
            return self._chart(title, [_binned(curve, parts) for curve in curves], {}, dots=True, **bounds)
        own = {}
        if all(len(arm.runs) == 1 for arm in self.arms):
            own = {
                i: intervals(run.validations, f"validation/{task}/{metric}")
                for i, run in enumerate(self.runs)
            }
        return self._chart(title, [*map(dict, curves)], own, dots=True, **bounds)

    def _chart(
        self,
        title: str,
        curves: Sequence[Mapping[float, float]],
        own: Mapping[int, Sequence[tuple[float, float, float]]],
        *,
        dots: bool = False,
        **options: Any,
    ) -> Chart | None:
        thin, lines = [], []
        for arm in self.arms:
            colour = arm.index % PALETTE
            its = [curves[run] for run in arm.runs]
            means = [
                (x, found)
                for x in sorted(set.intersection(*map(set, its)))
                if (found := estimate([curve[x] for curve in its])) is not None
            ]
            if len(its) > 1:
                thin += [Series(name="", points=sorted(c.items()), colour=colour, style="thin") for c in its]
            lines.append(
                Series(
                    name=f"{arm.mark} {arm.label}",
                    points=[(x, found.mean) for x, found in means],
                    colour=colour,
                    style="dots" if dots else "line",
                    band=[(x, *found.interval) for x, found in means if found.interval]
                    or own.get(arm.runs[0], ()),
                    mark=arm.mark,
                )
            )
        return chart(title, [*thin, *lines], clipped=True, **options)


def _parts(steps: Sequence[float]) -> Callable[[float], float]:
    """Return a function from a step to the middle of its bin; all runs have the same bins."""
    first, last = min(steps, default=0), max(steps, default=0)
    width = (last - first) // PARTS + 1

    def middle(step: float) -> float:
        begin = first + (step - first) // width * width
        return (begin + min(last, begin + width - 1)) / 2

    return middle


def _binned(curve: Sequence[Point], parts: Callable[[float], float]) -> dict[float, float]:
    """Return the mean of each bin, rounded to five digits, so that 1.0000001 is drawn as 1."""
    found: dict[float, list[float]] = {}
    for x, y in _finite(curve):
        found.setdefault(parts(x), []).append(y)
    return {x: float(f"{fmean(ys):.5g}") for x, ys in found.items()}


def _finite(curve: Sequence[Point]) -> list[Point]:
    return [(x, y) for x, y in curve if is_number(y)]
