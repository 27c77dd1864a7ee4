"""Groups runs that differ in nothing but their seed, and computes intervals over the seeds.  Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import cos, floor, pi, sin, sqrt, tan
from statistics import fmean, variance
from typing import Any

from attrs import frozen

CONFIDENCE = 0.95
"""Probability that an interval covers the mean over all seeds, if their results are normally distributed."""
IGNORED = ("seed", "tracking")
"""Keys in which the runs of an arm may differ: the seed, and trackers, which change no training."""
NAMED_KEYS = 2
"""Largest number of differing keys by which an arm is named; an arm with more has the names of its runs."""
LONGEST = 40
"""Number of characters of a value, or of a name, that are shown."""

Table = Mapping[str, Any]


@frozen(kw_only=True)
class Arm:
    """Runs with the same settings."""

    mark: str
    """A letter, which stands for the arm wherever it is drawn."""
    place: int
    """Place of its color and its dashes in the template's palette."""
    runs: tuple[int, ...]
    """Places of its runs."""
    label: str
    """The settings in which it differs from other arms, or the names of its runs."""


@frozen(kw_only=True)
class Estimate:
    """A mean over runs; the interval is None if there is one run only."""

    mean: float
    interval: tuple[float, float] | None = None


# ---------------------------------------------------------------------------------- arms


def grouped(histories: Sequence[Sequence[Table]], names: Sequence[str]) -> list[Arm]:
    """Return the arms, in the order of their first runs.

    Args:
        histories: configurations of each run, the newest last; a run that was continued with other settings
            has several, and one whose configuration cannot be read has none.
        names: the runs.
    """
    found: dict[str, list[int]] = {}
    for run, history in enumerate(histories):
        told = [sorted(settings(table).items()) for table in history]
        found.setdefault(json.dumps(told or ["unknown", run]), []).append(run)
    newest = [(histories[runs[0]] or [{}])[-1] for runs in found.values()]
    rows = differing(newest)
    return [
        Arm(
            mark=chr(ord("A") + place),
            place=place,
            runs=tuple(runs),
            label=_label(place, rows, [names[run] for run in runs]),
        )
        for place, runs in enumerate(found.values())
    ]


def settings(config: Table) -> dict[str, str]:
    """Return the values of a configuration as JSON, by keys such as ``trainer.lr``, without ignored ones."""
    found: dict[str, str] = {}

    def add(table: Table, where: str) -> None:
        for key, value in table.items():
            if isinstance(value, Mapping):
                add(value, f"{where}{key}.")
            else:
                found[where + key] = json.dumps(value, ensure_ascii=False, default=str)

    add({key: value for key, value in config.items() if key not in IGNORED}, "")
    return found


def differing(configs: Sequence[Table]) -> list[tuple[str, list[str]]]:
    """Return the keys in which configurations differ, with the value of each, or an empty text.

    Of a task that not all of them have, only the environment is there.
    """
    tables = [settings(config) for config in configs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [(key, [table.get(key, "") for table in tables]) for key in keys]
    tasks = [{*config.get("tasks", {})} for config in configs]
    lacking = tuple(f"tasks.{name}." for name in set.union(*tasks) - set.intersection(*tasks))
    rows = [row for row in rows if row[0].endswith(".env") or not row[0].startswith(lacking)]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _label(place: int, rows: Sequence[tuple[str, list[str]]], names: Sequence[str]) -> str:
    seeds = f" ({len(names)} runs)" if len(names) > 1 else ""
    if not 0 < len(rows) <= NAMED_KEYS:
        return cut(", ".join(names)) + seeds
    return ", ".join(f"{key} = {cut(values[place] or 'not set')}" for key, values in rows) + seeds


def cut(text: str) -> str:
    """Return a text that is not long."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


# ---------------------------------------------------------------------------------- intervals


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean and its interval by Student's t; None without a value."""
    if not values:
        return None
    mean, number = fmean(values), len(values)
    if number == 1:
        return Estimate(mean=mean)
    half = t_quantile(number - 1) * sqrt(variance(values) / number)
    return Estimate(mean=mean, interval=(mean - half, mean + half))


def difference(one: Sequence[float], other: Sequence[float]) -> Estimate | None:
    """Return how much larger the mean of ``one`` is; None without a value.

    The interval is Welch's, whose degrees of freedom are rounded down, which makes it wider.
    """
    if not one or not other:
        return None
    mean = fmean(one) - fmean(other)
    if min(len(one), len(other)) < 2:
        return Estimate(mean=mean)
    parts = [variance(values) / len(values) for values in (one, other)]
    whole = sum(parts)
    if not whole:
        return Estimate(mean=mean, interval=(mean, mean))
    terms = [part**2 / (len(values) - 1) for part, values in zip(parts, (one, other), strict=True)]
    half = t_quantile(max(1, floor(whole**2 / sum(terms) + 1e-9))) * sqrt(whole)
    return Estimate(mean=mean, interval=(mean - half, mean + half))


def t_quantile(freedom: int) -> float:
    """Return the size that Student's t exceeds with the probability ``1 - CONFIDENCE``."""
    low, high = 0.0, pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _covered(middle, freedom) < CONFIDENCE else (low, middle)
    return sqrt(freedom) * tan(low)


def _covered(angle: float, freedom: int) -> float:
    """Return P(abs(t) <= sqrt(freedom) * tan(angle)) (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    square = cos(angle) ** 2
    if freedom == 1:
        return 2 * angle / pi
    odd = freedom % 2
    term = total = cos(angle) if odd else 1.0
    for k in range(2 + odd, freedom - 1, 2):
        term *= square * (k - 1) / k
        total += term
    return 2 / pi * (angle + sin(angle) * total) if odd else sin(angle) * total
