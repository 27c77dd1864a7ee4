"""Formats the results of a validation as text."""

from __future__ import annotations

from collections.abc import Mapping

from grpo_core.loop.metrics import OF, headline, metric_names

SHARES = ("accuracy", "pass@", "pass^", "maj@", "truncated", "unscored")
"""Prefixes of metrics that are shown in percent."""
COUNTS = ("prompts", "errors", "rollouts")


def table(results: Mapping[str, Mapping[str, float]]) -> str:
    """Return a line for each metric of each task, with the interval ``NAME_low`` to ``NAME_high``."""
    rows = [("task", "metric", "value", "interval")]
    for task, metrics in results.items():
        name = task
        for metric in _shown_alone(metrics):
            value = _value(metric, metrics) if metric in metrics else "no score"
            rows.append((name, metric, value, interval(metric, metrics)))
            name = ""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:  # texts to the left, values to the right
        left = (cell.ljust(width) for cell, width in zip(row[:2], widths, strict=False))
        right = (cell.rjust(width) for cell, width in zip(row[2:], widths[2:], strict=True))
        lines.append("  ".join((*left, *right)).rstrip())
    return "\n".join(lines)


def interval(metric: str, metrics: Mapping[str, float]) -> str:
    """The interval of a metric, as text; empty if it has no interval."""
    bounds = [metrics.get(f"{metric}_{bound}") for bound in ("low", "high")]
    return " to ".join(shown(metric, bound) for bound in bounds if bound is not None)


def as_line(metrics: Mapping[str, float]) -> str:
    """The metrics of a task in one line, each with its interval."""
    parts = [] if headline(metrics) or "unscored" not in metrics else ["no score"]
    for metric in _shown_alone(metrics):
        bounds = interval(metric, metrics)
        if metric in metrics:
            parts.append(f"{metric} {_value(metric, metrics)}" + (f" ({bounds})" if bounds else ""))
        else:
            parts.append(f"{metric} {bounds} (no score)")
    return ", ".join(parts)


def _shown_alone(metrics: Mapping[str, float]) -> list[str]:
    return [metric for metric in metric_names(metrics) if metric != OF]


def _value(metric: str, metrics: Mapping[str, float]) -> str:
    if metric == "prompts" and OF in metrics:
        return number_of_prompts(metrics)
    return shown(metric, metrics[metric])


def number_of_prompts(metrics: Mapping[str, float]) -> str:
    """The number of measured prompts of a task, such as "200 of 400" or "the first 200"; empty if unknown."""
    used, of = metrics.get("prompts"), metrics.get(OF)
    if used is None or of is None:
        return "" if used is None else f"{used:.0f}"
    return f"{used:.0f} of {of:.0f}" if of else f"the first {used:.0f}"


def score(metric: str, metrics: Mapping[str, float]) -> str:
    """The value of a task's representative metric, or its interval, with the unscored share."""
    value, missing = metrics.get(metric), metrics.get("unscored")
    text = (interval(metric, metrics) or "no score") if value is None else shown(metric, value)
    return f"{text} ({missing:.0%} unscored)" if missing else text


def progress(first: Mapping[str, float], last: Mapping[str, float]) -> str:
    """The representative metric of a task in a first and a last validation; empty without one.

    A single validation is shown once.

    A reward is shown next to an accuracy: if it rises without the accuracy, it pays for something else.
    """
    name = headline(last) or headline(first) or ""
    if not name and "unscored" not in {*first, *last}:
        return ""
    if first is last:
        return f"{name} {score(name, last)}".strip()
    moved = f"{name} {score(headline(first) or name, first)} -> {score(name, last)}".strip()
    both = [each for each in (first, last) if "reward" in each]
    if name == "accuracy" and len(both) == 2 and any(each.get(name) != each["reward"] for each in both):
        moved += f", reward {shown('reward', first['reward'])} -> {shown('reward', last['reward'])}"
    return moved


def shown(metric: str, value: float) -> str:
    """The value of a metric, as text: shares in percent, counts without a fraction."""
    if metric.startswith(SHARES):
        return f"{value:.1%}"
    return f"{value:.0f}" if metric in COUNTS else f"{value:.4g}"
