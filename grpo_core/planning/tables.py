"""Forecasts as a table, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from attrs import frozen

from grpo_core.planning.forecast import Forecast
from grpo_core.planning.moments import Moments

NEAR = 1.02
"""Forecasts that differ by less than this factor are as good as each other."""


@frozen(kw_only=True)
class Row:
    """A line of the table."""

    name: str
    """Name of the variant, such as "pipeline.max_staleness=2"."""
    settings: Mapping[str, Any]
    """Configuration keys in which it differs from the present configuration."""
    forecast: Forecast
    recorded: bool = False
    """Whether it is no forecast but what a run has recorded."""
    moments: Moments | None = None
    """When the simulated run generated and trained."""


HEADS = ("", "s/step", "overlap", "generating", "training", "waiting", "staleness", "tokens/s")


def table(rows: Sequence[Row]) -> str:
    """Return a table with a line for each row."""
    lines = [HEADS, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEADS))]
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


def best(rows: Sequence[Row]) -> Row:
    """Return the first row that is about as fast as the fastest one."""
    fastest = min(row.forecast.seconds_per_step for row in rows)
    return next(row for row in rows if row.forecast.seconds_per_step <= fastest * NEAR)


def as_json(row: Row) -> dict[str, Any]:
    """Return a row as JSON values."""
    return {
        "name": row.name,
        "recorded": row.recorded,
        "settings": dict(row.settings),
        **attrs.asdict(row.forecast),
    }
