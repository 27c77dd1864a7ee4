"""Selects the curves of a run's charts, by task and over its steps.  Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from grpo_core.kit import SHARES, headline
from grpo_plugin_report.charts import Chart, Point, Series, chart, smoothed

Row = Mapping[str, Any]
"""A line of ``metrics.jsonl``."""

RECENT = 10
"""Number of steps over which the numbers of a table are averaged."""
SMOOTH = 40
"""Number of parts of a curve; each point of a smoothed curve is the mean of one part."""
MOST_PARTS = 12
"""Number of parts of a task's feedback that are drawn."""
GENERATION, TRAINING, GREY = 0, 1, 5
"""Places in the palette: the two sides of a run, and the background."""


@frozen(kw_only=True)
class Task:
    """A task's learning, and its numbers over the last steps."""

    name: str
    colour: int
    metric: str
    """The metric that stands for its validation."""
    in_percent: bool
    """Whether that metric is a share."""
    validation: Sequence[Point]
    """Results of the validations, by version; NaN for one that lacked too many scores to have one."""
    unscored: Mapping[float, float]
    """Share of the rollouts without a score, by version, of the validations that have some."""
    intervals: Sequence[tuple[float, float, float]]
    """Version, lower and upper end of the interval of each result that has one."""
    parts: Mapping[str, tuple[Sequence[Point], Sequence[Point]]]
    """Curves of each part that the environment reports besides the reward: in training, and in validation."""
    rewards: Sequence[Point]
    """Mean rewards in training, by step."""
    numbers: Mapping[str, float | None]
    """Means over the last steps that trained the task; None if no step did."""
    groups: int
    """Number of groups that were trained in all."""
    errors: int


NUMBERS: Mapping[str, str] = {
    "reward": "reward/{}",
    "accuracy": "accuracy/{}",
    "filtered": "filtered_fraction/{}",
    "equal": "frac_reward_zero_std/{}",
    "tokens": "completion_tokens/{}",
    "truncated": "truncated/{}",
    "staleness": "staleness/{}",
}
"""Columns of the table of tasks, and the metrics that they show."""


def tasks_of(steps: Sequence[Row], validations: Sequence[Row], config: Row) -> list[Task]:
    """Return the tasks of the configuration, and any task that was trained or measured."""
    configured = config.get("tasks")
    names = set(configured) if isinstance(configured, Mapping) else set()
    names |= {key.removeprefix("groups/") for row in steps for key in row if key.startswith("groups/")}
    measured: dict[str, list[str]] = {}
    for key in (key for row in validations for key in row if key.startswith("validation/")):
        task, _, metric = key.removeprefix("validation/").rpartition("/")
        if metric not in measured.setdefault(task, []):
            measured[task].append(metric)
    return [
        _task(name, place, steps, validations, measured.get(name, []))
        for place, name in enumerate(sorted(names | set(measured)))
    ]


def _task(
    name: str, place: int, steps: Sequence[Row], validations: Sequence[Row], measured: Sequence[str]
) -> Task:
    metric = headline(measured) or "reward"
    unscored = dict(points(validations, f"validation/{name}/unscored"))
    validation = dict(points(validations, f"validation/{name}/{metric}"))
    means = {}
    for column, metric_name in NUMBERS.items():
        means[column] = mean_over_groups(name, steps[-RECENT:], metric_name.format(name))
    return Task(
        name=name,
        colour=place % GREY,
        metric=metric,
        in_percent=metric.startswith(SHARES),
        validation=sorted((dict.fromkeys(unscored, math.nan) | validation).items()),
        unscored=unscored,
        intervals=_intervals(validations, f"validation/{name}/{metric}"),
        parts=_parts(name, steps, validations),
        rewards=points(steps, f"reward/{name}"),
        numbers=means,
        groups=round(_sum(steps, f"groups/{name}")),
        errors=round(_sum(steps, f"errors/{name}")),
    )


def _intervals(rows: Sequence[Row], metric: str) -> list[tuple[float, float, float]]:
    ends = [dict(points(rows, f"{metric}_{end}")) for end in ("low", "high")]
    return [(x, low, ends[1][x]) for x, low in ends[0].items() if x in ends[1]]


def _parts(
    task: str, steps: Sequence[Row], validations: Sequence[Row]
) -> dict[str, tuple[Sequence[Point], Sequence[Point]]]:
    """Return the curves of the first ``MOST_PARTS`` parts of a task's feedback, by name."""
    names = {
        key.removesuffix(f"/{task}").removeprefix("feedback_")
        for row in steps
        for key in row
        if key.startswith("feedback_") and key.endswith(f"/{task}")
    }
    beginning = f"validation/{task}/feedback_"
    names |= {key.removeprefix(beginning) for row in validations for key in row if key.startswith(beginning)}
    return {
        name: (points(steps, f"feedback_{name}/{task}"), points(validations, beginning + name))
        for name in sorted(names)[:MOST_PARTS]
    }


def charts(tasks: Sequence[Task], steps: Sequence[Row], config: Row) -> list[tuple[str, list[Chart]]]:
    """The charts that have something to show, in sections with a title."""
    sections = [
        ("Learning", [one for task in tasks for one in _learning(task)]),
        ("Reward parts", [one for task in tasks for one in _reward_parts(task)]),
        ("Groups", _groups(tasks, steps)),
        ("Asynchrony", _asynchrony(tasks, steps, config)),
        ("Health", _health(steps, config)),
    ]
    drawn = [(title, [one for one in found if one is not None]) for title, found in sections]
    return [(title, found) for title, found in drawn if found]


def _learning(task: Task) -> list[Chart | None]:
    reach = max(1, len(task.rewards) // SMOOTH)
    trained = [
        Series(name="reward of a step", points=task.rewards, colour=GREY, style="faint"),
        Series(name="reward in training", points=smoothed(task.rewards, reach), colour=GREY),
    ]
    held_out = Series(
        name=f"validation {task.metric}",
        points=task.validation,
        colour=task.colour,
        style="dots",
        band=task.intervals,
    )
    values = [y for _, y in (*task.rewards, *task.validation) if math.isfinite(y)]
    if all(0 <= y <= 1 for y in values):
        return [chart(task.name, [*trained, held_out], low=0, high=1, percent=task.in_percent)]
    return [chart(f"{task.name}: reward", trained), chart(f"{task.name}: validation", [held_out])]


def _reward_parts(task: Task) -> list[Chart | None]:
    """Return a chart of the parts that are shares, and one for each part that is not."""

    def series(place: int, name: str) -> list[Series]:
        trained, measured = task.parts[name]
        reach = max(1, len(trained) // SMOOTH)
        return [
            Series(name=name, points=smoothed(trained, reach), colour=place % GREY),
            Series(name=f"{name}, validation", points=measured, colour=place % GREY, style="dots"),
        ]

    values = {name: [y for part in task.parts[name] for _, y in part] for name in task.parts}
    shares = [name for name in values if all(0 <= y <= 1 for y in values[name] if math.isfinite(y))]
    together = [one for place, name in enumerate(shares) for one in series(place, name)]
    note = "what the environment reports besides the reward"
    return [
        chart(f"{task.name}: parts", together, low=0, high=1, note=note),
        *(chart(f"{task.name}: {name}", series(0, name), note=note) for name in values if name not in shares),
    ]


def _groups(tasks: Sequence[Task], steps: Sequence[Row]) -> list[Chart | None]:
    def of(metric: str) -> list[Series]:
        return [
            Series(name=task.name, points=points(steps, metric.format(task.name)), colour=task.colour)
            for task in tasks
        ]

    return [
        chart("groups in a step", of("groups/{}"), low=0, note="what the sampler chose"),
        chart("filtered", of("filtered_fraction/{}"), low=0, high=1, percent=True,
              note="share of the finished groups that were left out"),
        chart("equal rewards", _nonzero(of("frac_reward_zero_std/{}")), low=0, high=1, percent=True,
              note="share of the trained groups that teach nothing"),
        chart("tokens of a completion", of("completion_tokens/{}"), low=0, note="mean"),
        chart("tokens of the longest", of("completion_tokens_p95/{}"), low=0,
              note="of 20 completions 19 have at most as many"),
        chart("truncated", _nonzero(of("truncated/{}")), low=0, percent=True,
              note="share of the rollouts that a token limit cut off"),
        chart("errors", _nonzero(of("errors/{}")), low=0, note="rollouts unscored"),
    ]  # fmt: skip


def _asynchrony(tasks: Sequence[Task], steps: Sequence[Row], config: Row) -> list[Chart | None]:
    bound = config.get("pipeline", {}).get("max_staleness")
    trained = [task for task in tasks if task.groups]  # validation sets have none
    several = trained if len(trained) > 1 else ()
    return [
        chart(
            "staleness, in steps",
            [
                _series(steps, "staleness_max", "most", GREY, "faint"),
                *(_series(steps, f"staleness/{task.name}", task.name, task.colour) for task in several),
                *([] if several else [_series(steps, "staleness_mean", "mean", GENERATION)]),
            ],
            low=0,
            note="" if bound is None else f"max_staleness is {bound}",
        ),
        chart(
            "seconds of a step",
            [
                _series(steps, "time/step", "step", GREY, "faint"),
                _series(steps, "time/generate", "generating", GENERATION),
                _series(steps, "time/train", "training", TRAINING),
                _series(steps, "time/wait_for_groups", "waiting for groups", 2),
            ],
            low=0,
        ),
        chart(
            "overlap", [_series(steps, "overlap", "busier side", GENERATION)], low=0, high=1, percent=True,
            note="share of a step in which the busier side works",
        ),
        chart(
            "tokens per second",
            [
                _series(steps, "tokens_per_second/generation", "generated", GENERATION),
                _series(steps, "tokens_per_second/training", "trained", TRAINING),
            ],
            low=0,
        ),
        chart(
            "seconds of weights and checks",
            [
                _series(steps, "time/publish", "publication", TRAINING),
                _series(steps, "time/sync", "weight sync", GENERATION),
                _series(steps, "time/canary", "canary", 2),
                _series(steps, "time/validation", "validation", GREY, "dots"),
            ],
            low=0,
        ),
        chart("memory of processes", _memory(steps), low=0, note="GiB, those of this machine"),
        chart(
            "groups in the buffer",
            [
                _series(steps, "buffer/ready", "ready", GENERATION),
                _series(steps, "buffer/in_flight", "in flight", TRAINING),
                *_nonzero([_series(steps, "buffer/retrying", "to be played again", 2)]),
            ],
            low=0,
        ),
    ]  # fmt: skip


def _memory(steps: Sequence[Row]) -> list[Series]:
    """Return the memory of each process that the newest step has, in GiB."""
    names = sorted(name for name in (steps[-1] if steps else ()) if name.startswith("memory/"))
    return [
        Series(
            name=name.removeprefix("memory/"),
            points=[(step, mib / 1024) for step, mib in points(steps, name)],
            colour=place % GREY,
        )
        for place, name in enumerate(names)
    ]


def _health(steps: Sequence[Row], config: Row) -> list[Chart | None]:
    def one(title: str, metric: str, note: str = "", **options: Any) -> Chart | None:
        return chart(title, [_series(steps, metric, title, GENERATION)], note=note, **options)

    return [
        one("logprob_diff", "logprob_diff_mean", "engine against trainer, per token", low=0),
        one("mismatch_kl", "mismatch_kl", "from the engine's policy to the trainer's", low=0),
        one("effective sample size", "effective_sample_size", "of the importance ratios",
            low=0, high=1, percent=True),
        chart("clipped", [_series(steps, "clip_fraction_low", "low", GENERATION),
                          _series(steps, "clip_fraction_high", "high", TRAINING)],
              low=0, percent=True, note="share of the tokens without gradient"),
        one("entropy", "entropy", "nats per token", low=0),
        one("gradient norm", "grad_norm", low=0),
        one("loss", "loss"),
        one("learning rate", "lr", low=0),
    ]  # fmt: skip


def _series(steps: Sequence[Row], metric: str, name: str, colour: int, style: Any = "line") -> Series:
    return Series(name=name, points=points(steps, metric), colour=colour, style=style)


def _nonzero(series: Sequence[Series]) -> list[Series]:
    """Return all of them, or an empty list if they are 0 throughout."""
    return [*series] if any(y for one in series for _, y in one.points) else []


def points(rows: Sequence[Row], metric: str) -> list[Point]:
    """The metric over the steps; null, which is how NaN is written, is a gap."""
    return [
        (row["step"], math.nan if row[metric] is None else float(row[metric]))
        for row in rows
        if metric in row and isinstance(row.get("step"), int) and isinstance(row[metric], int | float | None)
    ]


def mean_over_groups(task: str, rows: Sequence[Row], metric: str) -> float | None:
    """Return the mean of a task's metric over the groups of some steps: a step may have few or many."""
    groups = dict(points(rows, f"groups/{task}"))
    found = [(groups.get(step, 1.0), y) for step, y in points(rows, metric) if math.isfinite(y)]
    whole = sum(weight for weight, _ in found)
    return sum(weight * y for weight, y in found) / whole if whole else None


def _sum(steps: Sequence[Row], metric: str) -> float:
    return sum(y for _, y in points(steps, metric) if math.isfinite(y))
