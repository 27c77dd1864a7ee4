"""Forecasts as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
from attrs import frozen

from grpo_core.planning.forecast import Forecast
from grpo_core.planning.moments import Moments
from grpo_core.planning.settings import idle

NEAR = 1.02
"""Forecasts that differ by less than this factor are as good as each other."""
WORK = ("dynamic_sampling.*", "rollout.group_size", "trainer.prompts_per_step")
"""Patterns of keys that change how many rollouts a step trains: seconds per step do not compare these."""


@frozen(kw_only=True)
class Row:
    """A line of the table."""

    name: str
    """Name of the variant, such as "pipeline.max_staleness=2"."""
    settings: Mapping[str, Any]
    """Configuration keys in which it differs from the present configuration."""
    forecast: Forecast
    moments: Moments | None = None
    """When the simulated run generated and trained."""


HEADS = ("", "s/step", "overlap", "generating", "training", "waiting", "staleness", "tokens/s")


def table(rows: Sequence[Row]) -> str:
    """Return a table with a line for each row."""
    lines = [HEADS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def _cells(row: Row) -> tuple[str, ...]:
    its = row.forecast
    return (
        row.name,
        f"{its.seconds_per_step:.3g}" if its.seconds_per_step < 1000 else f"{its.seconds_per_step:.0f}",
        f"{its.overlap:.0%}",
        f"{its.generating:.0%}",
        f"{its.training:.0%}",
        f"{its.waiting:.0%}",
        f"{its.staleness_mean:.2f}, max {its.staleness_max:.0f}",
        f"{its.tokens_per_second:.0f}",
    )


def best(rows: Sequence[Row]) -> Row | None:
    """Return the first row that is about as fast as the fastest one; None if no key has an effect."""
    candidates = [row for row in rows if not _only_idle(row, rows)]
    if not candidates:
        return None
    speed = [_speed(row, by_work=work_differs(rows)) for row in candidates]
    return next(row for row, its in zip(candidates, speed, strict=True) if its * NEAR >= max(speed))


def work_differs(rows: Sequence[Row]) -> bool:
    """Return whether a step of one row trains another number of rollouts than a step of another row."""
    return any(fnmatchcase(key, pattern) for key in _varied(rows) for pattern in WORK)


def _speed(row: Row, *, by_work: bool) -> float:
    its = row.forecast
    return its.rollouts_per_second if by_work else 1 / max(its.seconds_per_step, 1e-9)


def _only_idle(row: Row, rows: Sequence[Row]) -> bool:
    """Return whether the row differs from the others by nothing but keys that no time depends on."""
    own = [key for key in row.settings if key in _varied(rows)]
    return bool(own) and idle(own) == own


def _varied(rows: Sequence[Row]) -> set[str]:
    """Return the keys whose values differ between the rows; of a single row, all of them."""
    keys = {key for row in rows for key in row.settings}
    if len(rows) == 1:
        return keys
    return {key for key in keys if any(row.settings.get(key) != rows[0].settings.get(key) for row in rows)}


def as_json(row: Row) -> dict[str, Any]:
    """Return a row as JSON values."""
    return {
        "name": row.name,
        "settings": dict(row.settings),
        **attrs.asdict(row.forecast),
    }
