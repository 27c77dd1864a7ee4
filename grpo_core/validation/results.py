"""What a validation found, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHARES = ("accuracy", "pass@", "pass^", "maj@", "truncated")
"""Metrics that begin so are shown in percent."""
COUNTS = ("prompts", "errors", "rollouts")


def headline(metrics: Mapping[str, float]) -> float:
    """The one number that stands for a task: its accuracy, or else the first metric of the strategy."""
    return metrics.get("accuracy", next(iter(metrics.values())))


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """A line for each metric of each task; ``NAME_low`` and ``NAME_high`` are shown beside ``NAME``."""
    rows = [("task", "metric", "value", "interval")]
    for task, metrics in results.items():
        name = task
        for metric, value in metrics.items():
            base, _, bound = metric.rpartition("_")
            if bound in ("low", "high") and base in metrics:
                continue
            rows.append((name, metric, _shown(metric, value), _interval(metric, metrics)))
            name = ""
    return _aligned(rows)


def _interval(metric: str, metrics: Mapping[str, float]) -> str:
    bounds = [metrics.get(f"{metric}_{bound}") for bound in ("low", "high")]
    return " to ".join(_shown(metric, bound) for bound in bounds if bound is not None)


def _shown(metric: str, value: float) -> str:
    if metric.startswith(SHARES):
        return f"{value:.1%}"
    return f"{value:.0f}" if metric in COUNTS else f"{value:.4g}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Texts to the left, values to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        left = (cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False))
        right = (cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))
        lines.append("  ".join((*left, *right)).rstrip())
    return "\n".join(lines)
