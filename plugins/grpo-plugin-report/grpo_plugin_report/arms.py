"""Groups runs that differ only in their seed into arms, and computes intervals over seeds.  Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from math import cos, floor, pi, sin, sqrt, tan
from statistics import fmean, variance
from typing import Any

from attrs import frozen

from grpo_core.contracts.errors import shortened

CONFIDENCE = 0.95
"""Confidence of intervals for the mean over seeds, assuming normally distributed results."""
IGNORED = ("seed", "tracking")
"""Keys in which runs of an arm may differ: the seed, and trackers, which do not affect training."""
NAMED_KEYS = 2
"""Largest number of differing keys in an arm's label; arms with more are labelled by their runs."""
LONGEST = 40
"""Largest number of characters of a value or name."""

Table = Mapping[str, Any]


@frozen(kw_only=True)
class Arm:
    """Runs with the same settings."""

    mark: str
    """Letter of the arm in charts and tables."""
    index: int
    """Index of its colour and dashes in the template's palette."""
    runs: tuple[int, ...]
    """Indices of its runs."""
    label: str
    """Settings that differ from other arms, or the names of its runs."""


@frozen(kw_only=True)
class Estimate:
    """A mean over runs; the interval is None for a single run."""

    mean: float
    interval: tuple[float, float] | None = None


# ---------------------------------------------------------------------------------- arms


def grouped(histories: Sequence[Sequence[Table]], names: Sequence[str]) -> list[Arm]:
    """Return the arms, in the order of their first runs.

    Args:
        histories: configurations of each run, the newest last; a run that was resumed with other settings has
            several, and a run with an unreadable configuration has none.
        names: names of the runs.
    """
    found: dict[str, list[int]] = {}
    for run, history in enumerate(histories):
        tables = [sorted(settings(table).items()) for table in history]
        found.setdefault(json.dumps(tables or ["unknown", run]), []).append(run)
    newest = [(histories[runs[0]] or [{}])[-1] for runs in found.values()]
    rows = differing(newest)
    return [
        Arm(
            mark=chr(ord("A") + index),
            index=index,
            runs=tuple(runs),
            label=_label(index, rows, [names[run] for run in runs]),
        )
        for index, runs in enumerate(found.values())
    ]


def settings(config: Table) -> dict[str, str]:
    """Return the values of a configuration as JSON by dotted key, without ignored keys."""
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
    """Return the keys in which configurations differ, with each one's value, or an empty text.

    For a task that is missing in some of them, only the environment is included.
    """
    tables = [settings(config) for config in configs]
    keys = dict.fromkeys(key for table in tables for key in table)
    rows = [(key, [table.get(key, "") for table in tables]) for key in keys]
    tasks = [{*config.get("tasks", {})} for config in configs]
    lacking = tuple(f"tasks.{name}." for name in set.union(*tasks) - set.intersection(*tasks))
    rows = [row for row in rows if row[0].endswith(".env") or not row[0].startswith(lacking)]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _label(index: int, rows: Sequence[tuple[str, list[str]]], names: Sequence[str]) -> str:
    seeds = f" ({len(names)} runs)" if len(names) > 1 else ""
    if not 0 < len(rows) <= NAMED_KEYS:
        return shorten(", ".join(names)) + seeds
    return ", ".join(f"{key} = {shorten(values[index] or 'not set')}" for key, values in rows) + seeds


def shorten(text: str) -> str:
    """Shorten a value or a name."""
    return shortened(text, LONGEST)


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
    """Return the difference of the means of ``one`` and ``other``; None without a value.

    The interval is Welch's, with degrees of freedom rounded down, which widens it.
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
    """Return the two-sided quantile of Student's t for ``CONFIDENCE``."""
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
