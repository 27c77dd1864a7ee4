"""Formats the results of a validation as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHARES = ("accuracy", "pass@", "pass^", "maj@", "truncated")
"""Beginnings of the names of metrics that are shown in percent."""
COUNTS = ("prompts", "errors", "rollouts")


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Return a line for each metric of each task, with the interval ``NAME_low`` to ``NAME_high``."""
    rows = [("task", "metric", "value", "interval")]
    for task, metrics in results.items():
        name = task
        for metric in measured(metrics):
            rows.append((name, metric, shown(metric, metrics[metric]), interval(metric, metrics)))
            name = ""
    return _aligned(rows)


def measured(metrics: Mapping[str, float]) -> list[str]:
    """Return the metrics without the ends of other metrics' intervals."""
    ends = {f"{name}_{end}" for name in metrics for end in ("low", "high")}
    return [name for name in metrics if name not in ends]


def interval(metric: str, metrics: Mapping[str, float]) -> str:
    """The interval of a metric, as text; empty if it has no interval."""
    bounds = [metrics.get(f"{metric}_{bound}") for bound in ("low", "high")]
    return " to ".join(shown(metric, bound) for bound in bounds if bound is not None)


def shown(metric: str, value: float) -> str:
    """The value of a metric, as text: shares in percent, counts without a fraction."""
    if metric.startswith(SHARES):
        return f"{value:.1%}"
    return f"{value:.0f}" if metric in COUNTS else f"{value:.4g}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Align texts to the left and values to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        left = (cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False))
        right = (cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))
        lines.append("  ".join((*left, *right)).rstrip())
    return "\n".join(lines)
