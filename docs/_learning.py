"""Writes the tables of docs/learning.md, and its picture, from docs/learning.json.

    python docs/_learning.py

The numbers are those of tests/benchmarks/bench_learning.py.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from html import escape
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from grpo_plugin_report.charts import HEIGHT, Chart, Series, chart

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS))
from _blocks import filled  # noqa: E402 - it lies beside this file
from _learning_curves import COLOURS, TITLE, svg  # noqa: E402

ARMS = {
    "sort": [(0, "off"), (2, "token_truncate"), (2, "off"), (4, "sequence_truncate"), (4, "off")],
    "arrivals": [(0, "off"), (2, "token_truncate"), (2, "off"), (4, "token_truncate"), (4, "off")],
}
"""Settings of each task that the picture shows."""
WAYS = {
    "rewards (GRPO), one update a step": (0, "grpo"),
    "rewards, four updates": (0, "grpo_4"),
    "rewards and hints (`mix`), four updates": (0, "hints"),
}
"""The arms of the study of hints, by their titles on the page."""
NUMBERS, PICTURE, PAGE = DOCS / "learning.json", DOCS / "learning.svg", DOCS / "learning.md"
WINDOW = 10
"""Steps whose mean reward is one number of ``reward``."""
FEWEST = 3
"""Seeds from which a mean has an interval: that of two is wider than all that was measured."""
MARGIN = 0.02
"""Difference in accuracy below which two settings count as equal."""
LOSS = 0.03
"""Loss of accuracy below which a setting counts as not worse."""
AIM = 0.8
"""Mean reward to which the seconds are counted."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571}
"""Quantile 0.975 of Student's t for this many seeds: of an interval that covers the mean with 95%."""
T_90 = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132, 6: 2.015}
"""Quantile 0.95: two one-sided tests at 5% hold if the interval of 90% is within the margin."""

Arm = tuple[int, str]
"""Bound of staleness, and correction."""
SYNCHRONOUS: Arm = (0, "off")
Runs = Mapping[Arm, Mapping[int, Mapping[str, Any]]]
"""Runs by arm and seed."""


def read(task: str) -> Runs:
    found: dict[Arm, dict[int, Any]] = defaultdict(dict)
    for name, run in json.loads(NUMBERS.read_text()).items():
        if name == "pace":
            continue
        of, bound, correction, seed = name.split("/")
        if of == task:
            found[int(bound), correction][int(seed)] = run
    return dict(sorted(found.items()))


def interval(values: Sequence[float], quantiles: Mapping[int, float]) -> tuple[float, float]:
    """Return the mean, and how far the ends of its interval are from it."""
    return fmean(values), quantiles[len(values)] * stdev(values) / sqrt(len(values))


def _cell(values: Sequence[float], *, scale: float = 100.0, digits: int = 1, unit: str = "%") -> str:
    if len(values) < FEWEST:
        return f"{fmean(values) * scale:.{digits}f}{unit}"
    mean, half = interval(values, T_95)
    return f"{mean * scale:.{digits}f}{unit} ± {half * scale:.{digits}f}"


def table(task: str, runs: Runs) -> str:
    """One row for each arm."""
    lines = [
        "| `max_staleness` | correction | seeds | accuracy | against 0, in points | mean reward "
        f"| seconds to {AIM} |",
        "|---|---|---|---|---|---|---|",
    ]
    for (bound, correction), seeds in runs.items():
        accuracy = [run["accuracy"] for run in seeds.values()]
        reward = [fmean(run["reward"]) for run in seeds.values()]
        lines.append(
            f"| {bound} | {'none' if correction == 'off' else f'`{correction}`'} | {len(seeds)} "
            f"| {_cell(accuracy)} | {_against(runs, (bound, correction), SYNCHRONOUS)} "
            f"| {_cell(reward, scale=1.0, digits=3, unit='')} | {_seconds(task, bound, seeds)} |"
        )
    return "\n".join(lines)


def _seconds(task: str, bound: int, seeds: Mapping[int, Mapping[str, Any]]) -> str:
    """Return the steps to the mean reward ``AIM``, times the median of the seconds of a step."""
    rewards = [fmean(each) for each in zip(*(run["reward"] for run in seeds.values()), strict=True)]
    steps = next((WINDOW * (place + 0.5) for place, each in enumerate(rewards) if each >= AIM), None)
    pace = json.loads(NUMBERS.read_text())["pace"].get(f"{task}/{bound}")
    return f"{steps * median(pace):.0f}" if steps and pace else ""


def differences(runs: Runs, arm: Arm, other: Arm) -> list[float]:
    """Differences in accuracy of two arms, one for each seed that both have."""
    common = sorted(runs[arm].keys() & runs[other].keys())
    return [runs[arm][seed]["accuracy"] - runs[other][seed]["accuracy"] for seed in common]


def _against(runs: Runs, arm: Arm, other: Arm) -> str:
    found = differences(runs, arm, other)
    if arm == other or len(found) < FEWEST:
        return ""
    mean, half = interval(found, T_95)
    return f"{mean * 100:+.1f} ± {half * 100:.1f}"


def equivalence(runs: Runs, arm: Arm, other: Arm) -> str:
    """Two one-sided tests of the difference of two arms, paired by seed."""
    paired = differences(runs, arm, other)
    mean, half = interval(paired, T_90)
    low, high = mean - half, mean + half
    if low > -MARGIN and high < MARGIN:
        told = f"is within {MARGIN:.0%}: the two are equal in this sense"
    elif high < -MARGIN or low > MARGIN:
        told = f"is beyond {MARGIN:.0%}: they differ by more than that"
    else:
        told = f"is not within {MARGIN:.0%}: equality is not shown"
    return (
        f"The difference in accuracy, paired by {len(paired)} seeds, is {mean * 100:+.1f} points; its "
        f"interval of 90%, {low * 100:+.1f} to {high * 100:+.1f}, {told}."
    )


def not_worse(runs: Runs) -> str:
    """Return what each correction of the study loses with a bound, and whether that is within ``LOSS``."""
    lines = [
        f"| `max_staleness` | correction | seeds | loses, in points | at most | within {LOSS * 100:.0f} |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for bound, correction in product((2, 4, 8), ("token_truncate", "geometric_mask")):
        paired = differences(runs, (bound, correction), SYNCHRONOUS)
        mean, half = interval(paired, T_90)
        cells = [bound, f"`{correction}`", len(paired), f"{-mean * 100:.1f}", f"{(half - mean) * 100:.1f}"]
        lines.append(f"| {' | '.join(map(str, cells))} | {'yes' if half - mean < LOSS else 'not shown'} |")
    return "\n".join(lines)


def taught(runs: Runs) -> str:
    """Return a table of the accuracy after so many steps, from rewards and from hints."""
    if not runs:
        return "No seed is in yet."
    lines = ["| learns from | seeds | at first | 10 steps | 20 | 40 |", "|---|---|---|---|---|---|"]
    for name, arm in WAYS.items():
        if arm not in runs:
            continue
        its = [run["validated"] for run in runs[arm].values()]
        columns = ([run[at] for run in its if at < len(run)] for at in (0, 1, 2, 4))
        cells = [
            _cell(found) + (f" (seeds: {len(found)})" if len(found) < len(its) else "") if found else ""
            for found in columns
        ]
        lines.append(f"| {name} | {len(its)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def drawn(task: str) -> Chart:
    """Mean rewards of a task by step."""
    runs, arms = read(task), ARMS[task]
    lines = []
    for colour, arm in enumerate(arms):
        rewards = [run["reward"] for run in runs[arm].values()]
        points = [
            ((place + 0.5) * WINDOW, fmean(each)) for place, each in enumerate(zip(*rewards, strict=True))
        ]
        lines.append(Series(name=_name(arm), points=points, colour=colour))
    made = chart(f"{task}: mean reward by step", lines, low=0.0, high=1.0)
    assert made is not None
    return made


def _name(arm: Arm) -> str:
    bound, correction = arm
    return f"staleness {bound}" + ("" if correction == "off" else f", {correction}")


def legend() -> str:
    """The names of the lines, below each other in the chart of each task."""
    return "".join(
        f'<text x="300" y="{(HEIGHT + TITLE) * row + TITLE + 88 + 14 * place}" '
        f'fill="{COLOURS[place]}">{escape(_name(arm))}</text>'
        for row, arms in enumerate(ARMS.values())
        for place, arm in enumerate(arms)
    )


def page() -> str:
    """The page with the present numbers."""
    parts = {f"{task}: runs": table(task, read(task)) for task in ARMS}
    parts["arrivals: equivalence"] = equivalence(read("arrivals"), (2, "token_truncate"), SYNCHRONOUS)
    parts["sort: not worse"] = not_worse(read("sort"))
    parts |= {f"{task}: runs": taught(read(task)) for task in ("sums", "largest")}
    return filled(PAGE.read_text(encoding="utf-8"), parts)


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    note = "mean over the seeds of the table"
    PICTURE.write_text(svg([drawn(task) for task in ARMS], note).replace("</svg>", legend() + "</svg>"))


if __name__ == "__main__":
    main()
