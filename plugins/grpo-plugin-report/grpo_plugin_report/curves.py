"""The curves of a run's charts, by task and over its steps.  Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from attrs import evolve, frozen

from grpo_core.loop.metrics import headline
from grpo_core.validation.results import SHARES
from grpo_plugin_report.charts import Chart, Point, Series, chart

Row = Mapping[str, Any]
"""A line of ``metrics.jsonl``."""

RECENT = 10
"""Number of steps that the numbers of a table are averaged over."""
MOST_PARTS = 12
"""Largest number of parts of a task's feedback in charts."""
GREY = 5
"""Index of grey in the palette, after all colours."""


@frozen(kw_only=True)
class Task:
    """Curves of a task, and its means over the last steps."""

    name: str
    colour: int
    metric: str
    """Main metric of its validation."""
    in_percent: bool
    """Whether this metric is a share."""
    validation: Sequence[Point]
    """Results of validations by version; NaN if too many scores are missing."""
    unscored: Mapping[float, float]
    """Share of unscored rollouts by version, where there are any."""
    intervals: Sequence[tuple[float, float, float]]
    """Version, lower and upper end of each interval."""
    parts: Mapping[str, tuple[Sequence[Point], Sequence[Point]]]
    """Training and validation curves of each part of the feedback."""
    rewards: Sequence[Point]
    """Mean training rewards by step."""
    held_out: Sequence[Point]
    """Mean validation rewards by version, if the main metric is another one."""
    numbers: Mapping[str, float | None]
    """Means over the last steps that trained the task, or None."""
    groups: int
    """Total number of trained groups."""
    errors: int
    prompts: str
    """Number of prompts of the last validation, such as "200 of 400"; empty if it had all of them."""


NUMBERS: Mapping[str, str] = {
    "reward": "reward/{}",
    "accuracy": "accuracy/{}",
    "filtered": "filtered_fraction/{}",
    "equal": "frac_reward_zero_std/{}",
    "tokens": "completion_tokens/{}",
    "truncated": "truncated/{}",
    "staleness": "staleness/{}",
}
"""Columns of the table of tasks, and their metrics."""


def tasks_of(steps: Sequence[Row], validations: Sequence[Row], config: Row) -> list[Task]:
    """Return the tasks of the configuration, and all tasks with training or validation metrics."""
    configured = config.get("tasks")
    names = set(configured) if isinstance(configured, Mapping) else set()
    measured = measured_in(validations)
    tasks = []
    for index, name in enumerate(sorted(names | trained_in(steps) | set(measured))):
        metric = headline(measured.get(name, ())) or "reward"
        unscored = dict(points(validations, f"validation/{name}/unscored"))
        validation = dict(points(validations, f"validation/{name}/{metric}"))
        made = Task(
            name=name,
            colour=index + index // GREY,
            metric=metric,
            in_percent=metric.startswith(SHARES),
            validation=sorted((dict.fromkeys(unscored, math.nan) | validation).items()),
            unscored=unscored,
            intervals=intervals(validations, f"validation/{name}/{metric}"),
            parts=_parts(name, steps, validations),
            rewards=points(steps, f"reward/{name}"),
            held_out=[] if metric == "reward" else points(validations, f"validation/{name}/reward"),
            numbers={
                column: mean_over_groups(name, steps[-RECENT:], numbers.format(name))
                for column, numbers in NUMBERS.items()
            },
            groups=round(_sum(steps, f"groups/{name}")),
            errors=round(_sum(steps, f"errors/{name}")),
            prompts=_part_of_the_prompts(validations, name),
        )
        tasks.append(made)
    return tasks


def trained_in(steps: Sequence[Row]) -> set[str]:
    """Return the trained tasks."""
    return {key.removeprefix("groups/") for row in steps for key in row if key.startswith("groups/")}


def measured_in(validations: Sequence[Row]) -> dict[str, dict[str, None]]:
    """Return the metrics of each task that was validated, in their order."""
    found: dict[str, dict[str, None]] = {}
    for key in (key for row in validations for key in row if key.startswith("validation/")):
        task, _, metric = key.removeprefix("validation/").rpartition("/")
        found.setdefault(task, {})[metric] = None
    return found


def intervals(rows: Sequence[Row], metric: str) -> list[tuple[float, float, float]]:
    ends = [dict(points(rows, f"{metric}_{end}")) for end in ("low", "high")]
    return [(x, low, ends[1][x]) for x, low in ends[0].items() if x in ends[1]]


def _parts(
    task: str, steps: Sequence[Row], validations: Sequence[Row]
) -> dict[str, tuple[Sequence[Point], Sequence[Point]]]:
    """Return the curves of the first ``MOST_PARTS`` parts of a task's feedback by name."""
    names = {
        key.removesuffix(f"/{task}").removeprefix("feedback_")
        for row in steps
        for key in row
        if key.startswith("feedback_") and key.endswith(f"/{task}")
    }
    beginning = f"validation/{task}/feedback_"
    names |= {key.removeprefix(beginning) for row in validations for key in row if key.startswith(beginning)}
    return {
        unquote(name): (points(steps, f"feedback_{name}/{task}"), points(validations, beginning + name))
        for name in sorted(names)[:MOST_PARTS]
    }


@frozen
class Plot:
    """A chart of step metrics, for one or several runs."""

    title: str
    metrics: Mapping[str, str]
    """Metrics by the name of their line; several runs show only the first metric, with a line for each run.
    "{}" is replaced by each task."""
    note: str = ""
    low: float | None = None
    high: float | None = None
    percent: bool = False
    rare: bool = False
    """Whether the chart is omitted if all values are 0."""


GROUPS = (
    Plot("groups in a step", {"": "groups/{}"}, "what the sampler chose", low=0),
    Plot("filtered", {"": "filtered_fraction/{}"}, "share of the finished groups that were left out",
         0, 1, True),
    Plot("equal rewards", {"": "frac_reward_zero_std/{}"}, "share of the trained groups that teach nothing",
         0, 1, True, rare=True),
    Plot("tokens of a completion", {"": "completion_tokens/{}"}, "mean", low=0),
    Plot("tokens of the longest", {"": "completion_tokens_p95/{}"},
         "of 20 completions 19 have at most as many", low=0),
    Plot("truncated", {"": "truncated/{}"}, "share of the rollouts that a token limit cut off", low=0,
         percent=True, rare=True),
    Plot("errors", {"": "errors/{}"}, "rollouts unscored", low=0, rare=True),
)  # fmt: skip
ASYNCHRONY = (
    Plot("staleness, in steps", {"mean": "staleness_mean", "most": "staleness_max"}, low=0),
    Plot("seconds of a step", {"step": "time/step", "generating": "time/generate", "training": "time/train",
                               "waiting for groups": "time/wait_for_groups"}, low=0),
    Plot("overlap", {"": "overlap"}, "share of a step in which both sides work", 0, 1, True),
    Plot("tokens per second", {"generated": "tokens_per_second/generation",
                               "trained": "tokens_per_second/training"}, low=0),
    Plot("seconds of weights and checks", {"publication": "time/publish", "weight sync": "time/sync",
                                           "canary": "time/canary", "validation": "time/validation"}, low=0),
    Plot("groups in the buffer", {"ready": "buffer/ready", "in flight": "buffer/in_flight",
                                  "to be played again": "buffer/retrying"}, low=0),
)  # fmt: skip
HEALTH = (
    Plot("logprob_diff", {"mean": "logprob_diff_mean"}, "engine against trainer, per token", low=0),
    Plot("mismatch_kl", {"kl": "mismatch_kl"}, "from the engine's policy to the trainer's", low=0),
    Plot("effective sample size", {"share": "effective_sample_size"}, "of the importance ratios", 0, 1, True),
    Plot("clipped", {"low": "clip_fraction_low", "high": "clip_fraction_high"},
         "share of the tokens without gradient", low=0, percent=True),
    Plot("kl", {"kl": "kl"}, "to the reference model"),
    Plot("entropy", {"entropy": "entropy"}, "nats per token", low=0),
    Plot("gradient norm", {"norm": "grad_norm"}, low=0),
    Plot("loss", {"loss": "loss"}),
    Plot("learning rate", {"lr": "lr"}, low=0),
)  # fmt: skip


def charts(tasks: Sequence[Task], steps: Sequence[Row], config: Row) -> list[tuple[str, list[Chart]]]:
    """Return the non-empty charts, in sections with a title."""
    bound = config.get("pipeline", {}).get("max_staleness")
    stale = evolve(ASYNCHRONY[0], note="" if bound is None else f"max_staleness is {bound}")
    memory = {name.removeprefix("memory/"): name for name in sorted(steps[-1] if steps else ())
              if name.startswith("memory/")}  # fmt: skip
    processes = Plot("memory of processes", memory, "MiB, those of this machine", low=0)
    sections = [
        ("Learning", [one for task in tasks for one in (*_learning(task), *_reward_parts(task))]),
        ("Groups", [_drawn(plot, steps, tasks) for plot in GROUPS[len(tasks) < 2 :]]),  # one is a flat line
        ("Asynchrony", [_drawn(plot, steps) for plot in (stale, *ASYNCHRONY[1:], processes)]),
        ("Health", [_drawn(plot, steps) for plot in HEALTH]),
    ]
    return with_something(sections)


def with_something(sections: Sequence[tuple[str, Sequence[Chart | None]]]) -> list[tuple[str, list[Chart]]]:
    """Return the non-empty charts, without empty sections."""
    drawn = [(title, [one for one in found if one is not None]) for title, found in sections]
    return [(title, found) for title, found in drawn if found]


def _drawn(plot: Plot, steps: Sequence[Row], tasks: Sequence[Task] = ()) -> Chart | None:
    lines = [
        (task.name, metric.format(task.name), task.colour)
        for task in tasks
        for metric in plot.metrics.values()
    ]
    lines = lines or [(name, metric, index) for index, (name, metric) in enumerate(plot.metrics.items())]
    series = [
        Series(name=name, points=points(steps, metric), colour=colour) for name, metric, colour in lines
    ]
    if plot.rare and not any(y for one in series for _, y in one.points):
        return None
    return chart(plot.title, series, note=plot.note, low=plot.low, high=plot.high, percent=plot.percent)


def _learning(task: Task) -> list[Chart | None]:
    trained = [Series(name="reward in training", points=task.rewards, colour=GREY)]
    held_out = Series(
        name=f"validation {task.metric}",
        points=task.validation,
        colour=task.colour,
        style="dots",
        band=task.intervals,
    )
    if [y for _, y in task.held_out] != [y for _, y in task.validation]:  # if they differ
        trained.append(Series(name="validation reward", points=task.held_out, colour=GREY, style="dots"))
    values = [y for _, y in (*task.rewards, *task.held_out, *task.validation) if math.isfinite(y)]
    note = f"validated on {task.prompts} held-out prompts" if task.prompts else ""
    if all(0 <= y <= 1 for y in values):
        return [chart(task.name, [*trained, held_out], note=note, low=0, high=1, percent=task.in_percent)]
    return [
        chart(f"{task.name}: reward", trained),
        chart(f"{task.name}: validation", [held_out], note=note),
    ]


def _part_of_the_prompts(validations: Sequence[Row], task: str) -> str:
    used, of = (points(validations, f"validation/{task}/{name}")[-1:] for name in ("prompts", "prompts_of"))
    if not used or not of:
        return ""
    return f"{used[0][1]:.0f} of {of[0][1]:.0f}" if of[0][1] else f"the first {used[0][1]:.0f}"


def _reward_parts(task: Task) -> list[Chart | None]:
    """Return one chart of all parts that are shares, and a chart for each other part."""

    def series(index: int, name: str) -> list[Series]:
        trained, measured = task.parts[name]
        return [
            Series(name=name, points=trained, colour=index + index // GREY),
            Series(name=f"{name}, validation", points=measured, colour=index + index // GREY, style="dots"),
        ]

    values = {name: [y for part in task.parts[name] for _, y in part] for name in task.parts}
    shares = [name for name in values if all(0 <= y <= 1 for y in values[name] if math.isfinite(y))]
    together = [one for index, name in enumerate(shares) for one in series(index, name)]
    note = "what the environment reports besides the reward"
    return [
        chart(f"{task.name}: parts", together, low=0, high=1, note=note),
        *(chart(f"{task.name}: {name}", series(0, name), note=note) for name in values if name not in shares),
    ]


def points(rows: Sequence[Row], metric: str) -> list[Point]:
    """Return the curve of a metric over the steps; null, the encoding of NaN, is a gap."""
    return [
        (row["step"], math.nan if row[metric] is None else float(row[metric]))
        for row in rows
        if metric in row and isinstance(row.get("step"), int) and isinstance(row[metric], int | float | None)
    ]


def mean_over_groups(task: str, rows: Sequence[Row], metric: str) -> float | None:
    """Return the mean of a task's metric over the groups of steps, weighted by the number of groups."""
    groups = dict(points(rows, f"groups/{task}"))
    found = [(groups.get(step, 1.0), y) for step, y in points(rows, metric) if math.isfinite(y)]
    whole = sum(weight for weight, _ in found)
    return sum(weight * y for weight, y in found) / whole if whole else None


def _sum(steps: Sequence[Row], metric: str) -> float:
    return sum(y for _, y in points(steps, metric) if math.isfinite(y))
