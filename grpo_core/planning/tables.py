"""Forecasts as a table, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import attrs
from attrs import frozen

from grpo_core.config import Config
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
    recorded: bool = False
    """Whether it is no forecast but what a run has recorded."""
    gpus: float = 0.0
    """Number of GPUs of the engines and the trainer."""
    moments: Moments | None = None
    """When the simulated run generated and trained."""


HEADS = ("", "s/step", "overlap", "generating", "training", "waiting", "staleness", "tokens/s")
PRICE = "cost/1,000 rollouts"


def table(rows: Sequence[Row], price: float | None = None) -> str:
    """Return a table with a line for each row, with what rollouts cost at a price of an hour of a GPU."""
    if price is None:
        lines = [HEADS, *(_cells(row) for row in rows)]
    else:
        lines = [(*HEADS, PRICE), *((*_cells(row), f"{cost(row, price):.3g}") for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )


def cost(row: Row, price: float) -> float:
    """Return the cost of 1,000 trained rollouts at a price of an hour of a GPU."""
    rate = row.forecast.rollouts_per_second
    return 1000 / rate / 3600 * row.gpus * price if rate else math.inf


def gpus_of(config: Config) -> float:
    """Return the number of GPUs of a run: one for each engine and for each rank, unless it says otherwise."""
    engine = config.engine
    generating = len(engine.gpus) or engine.workers * (engine.gpus_per_worker or 1.0)
    return generating + config.trainer.ranks


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


def as_json(row: Row, price: float | None = None) -> dict[str, Any]:
    """Return a row as JSON values."""
    costs = {} if price is None or not row.forecast.rollouts_per_second else {"cost": cost(row, price)}
    return {
        "name": row.name,
        "recorded": row.recorded,
        "settings": dict(row.settings),
        **attrs.asdict(row.forecast),
        **costs,
    }
