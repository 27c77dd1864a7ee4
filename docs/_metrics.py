"""Writes docs/metrics.md from grpo_core/loop/metrics.py."""

from __future__ import annotations

from pathlib import Path

from grpo_core.loop.metrics import METRICS

HERE = Path(__file__).parent

HEAD = """# Metrics

`metrics.jsonl` of a run has one line for each step and one for each validation: `step`, `time` (seconds since
1970), and the metrics below. Trackers receive the same names. `step` is the version of the weights that the
numbers are about; NaN is written as `null`.

A name is `name`, `group/name`, `name/TASK` or `validation/TASK/name`; `name` itself contains no slash.
Capitals stand for any text: TASK is a task's name, PART what an environment calls a part of its feedback.
Losses and validation strategies of plugins add metrics of their own.

(Written by `python docs/_metrics.py`.)
"""


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for section, metrics in METRICS.items():
        lines += [f"## {section}", "", "| metric | unit | meaning |", "|---|---|---|"]
        lines += [f"| `{name}` | {metric.unit} | {metric.meaning} |" for name, metric in metrics.items()]
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    (HERE / "metrics.md").write_text(page(), encoding="utf-8")
