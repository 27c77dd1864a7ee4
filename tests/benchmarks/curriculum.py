"""The gain of a curriculum: steps until two tasks have reached a target, for four ways to choose.

    python tests/benchmarks/curriculum.py [--seeds 5] [--output docs/samplers]

Trains each seed with each sampler and prints a line for each run, then draws OUTPUT.svg from OUTPUT.json.
What is in the JSON file already is not run again, so that it may be stopped at any time; a change of the
settings below starts it anew.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment

from grpo_plugin_report.charts import Chart, Series, chart

TARGET, STEPS, EVERY = 0.6, 200, 10
SETTINGS: Mapping[str, str] = {
    "tasks.easy.env": "math:sort",
    "tasks.hard.env": "math:reverse",
    "tasks.hard.options": "{ length = 3 }",
    "model.options.warm_start_steps": "70",
    "trainer.steps": str(STEPS),
    "trainer.prompts_per_step": "32",
    "validation.every": str(EVERY),
    "checkpoint.every": "0",
}
ARMS: Mapping[str, Mapping[str, str]] = {
    "mix": {"sampler.name": "mix"},
    "schedule": {
        "sampler.name": "schedule",
        "sampler.options": "{ points = { hard = [[5, 0.1], [20, 0.9]], easy = [[5, 0.9], [20, 0.1]] } }",
    },
    "curriculum": {
        "sampler.name": "curriculum",
        "sampler.options": "{ high = 0.65, rest = 0.1 }",  # a little above the target
    },
    "only hard": {"sampler.name": "mix", "sampler.options": "{ weights = { easy = 0, hard = 1 } }"},
}
TASKS = ("easy", "hard")

Curve = list[tuple[int, dict[str, float]]]
"""Step and accuracy of each task."""


def trained(settings: Mapping[str, str], seed: int) -> Curve:
    """The validation accuracies of a run."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        given = {**SETTINGS, **settings, "seed": str(seed)}
        options = [part for key, value in given.items() for part in ("--set", f"{key}={value}")]
        program = str(Path(sys.executable).with_name("grpo-core"))
        subprocess.run(
            [program, "train", "--output", str(run), *options], check=True, stdout=subprocess.DEVNULL
        )
        rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    key = "validation/{}/accuracy"
    return [
        (row["step"], {task: row[key.format(task)] for task in TASKS})
        for row in rows
        if key.format("hard") in row
    ]


def reached(curve: Curve) -> int | None:
    """The first step at which both tasks are at the target; None: never."""
    return next((step for step, scores in curve if min(scores.values()) >= TARGET), None)


def run_all(seeds: int, path: Path) -> dict[str, Any]:
    """The curves by sampler and seed; kept in ``path`` as they are made."""
    settings = {"steps": STEPS, "target": TARGET, "common": SETTINGS, "samplers": ARMS}
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if found.get("settings") != settings:
        found = {"settings": settings, "curves": {name: {} for name in ARMS}}
    for seed in range(seeds):
        for name, arm in ARMS.items():
            if str(seed) in found["curves"][name]:
                continue
            begin = time.perf_counter()
            curve = trained(arm, seed)
            found["curves"][name][str(seed)] = curve
            path.write_text(json.dumps(found))
            last = ", ".join(f"{task} {score:.2f}" for task, score in curve[-1][1].items())
            when = f"step {step}" if (step := reached(curve)) else "never"
            seconds = time.perf_counter() - begin
            print(f"seed {seed}  {name:<10}  {when:>8}  in the end: {last}  ({seconds:.0f} s)", flush=True)
    return found["curves"]


# ---------------------------------------------------------------------------------- what is shown


def table(curves: Mapping[str, Mapping[str, Curve]]) -> Iterator[str]:
    """A line for each sampler."""
    yield f"steps until both tasks are at {TARGET:.0%} (measured every {EVERY} steps, {STEPS} at most)"
    for name, by_seed in curves.items():
        steps = [reached(curve) for curve in by_seed.values()]
        done = sum(step is not None for step in steps)
        counted = sorted(step if step is not None else STEPS + 1 for step in steps)
        middle = statistics.median_high(counted) if counted else STEPS + 1
        shown = f"{middle:.0f}" if middle <= STEPS else f"more than {STEPS}"
        each = ", ".join("never" if step is None else str(step) for step in steps)
        yield f"{name:<10}  reached by {done} of {len(steps)} seeds, median {shown:>13}  ({each})"


def panels(curves: Mapping[str, Mapping[str, Curve]]) -> Iterator[Chart]:
    """For each task the mean over the seeds, by sampler."""
    for task in TASKS:
        drawn = chart(
            task,
            [
                Series(name=name, points=means([*c.values()], task), colour=i)
                for i, (name, c) in enumerate(curves.items())
            ],
            low=0,
            high=1,
            percent=True,
        )
        assert drawn is not None, "there is a curve"
        yield drawn


def means(curves: Sequence[Curve], task: str) -> list[tuple[float, float]]:
    """Over the seeds, at each step."""
    return [
        (points[0][0], statistics.fmean(scores[task] for _, scores in points))
        for points in zip(*curves, strict=True)
    ]


PICTURE = """\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {{ width }} 270" font-family="system-ui, sans-serif" \
font-size="12" role="img" aria-label="{{ title }}">
<style>
  .page { fill: #fff } .text { fill: #1c2330 } .dim { fill: #667085 } .grid { stroke: #e3e6eb }
  .line { fill: none; stroke-width: 2.2; stroke-linejoin: round }
  .c0 { stroke: #8a93a3 } .c1 { stroke: #2563c9 } .c2 { stroke: #d9622b }
  .c3 { stroke: #8a4fc4; stroke-dasharray: 5 4 }
  @media (prefers-color-scheme: dark) {
    .page { fill: #12151a } .text { fill: #e4e8ee } .dim { fill: #93a0b2 } .grid { stroke: #2a313c }
    .c0 { stroke: #7f8b9d } .c1 { stroke: #6ea8fe } .c2 { stroke: #f59b6a } .c3 { stroke: #bd93f0 }
  }
</style>
<rect class="page" width="{{ width }}" height="270"/>
{% for panel in panels %}
<g transform="translate({{ loop.index0 * panel.width }} 32)">
  <text class="text" x="{{ panel.left }}" y="-10" font-weight="600">
    {{- panel.title }} task: validation accuracy by step</text>
  {% for y, text in panel.y_ticks %}
  <line class="grid" x1="{{ panel.left }}" x2="{{ panel.width - 12 }}" y1="{{ y }}" y2="{{ y }}"/>
  <text class="dim" x="{{ panel.left - 6 }}" y="{{ y + 4 }}" text-anchor="end">{{ text }}</text>
  {% endfor %}
  {% for x, text in panel.x_ticks %}
  <text class="dim" x="{{ x }}" y="{{ panel.height - 6 }}" text-anchor="middle">{{ text }}</text>
  {% endfor %}
  {% for line in panel.lines %}
  <path class="line c{{ loop.index0 }}" d="{{ line }}"/>
  {% endfor %}
</g>
{% endfor %}
{% for name in names %}
{% set x = 46 + 130 * loop.index0 %}
<line class="line c{{ loop.index0 }}" x1="{{ x }}" x2="{{ x + 24 }}" y1="254" y2="254"/>
<text class="text" x="{{ x + 30 }}" y="258">{{ name }}</text>
{% endfor %}
<text class="dim" x="{{ width - 12 }}" y="258" text-anchor="end">mean of {{ seeds }} seeds</text>
</svg>
"""


def picture(curves: Mapping[str, Mapping[str, Curve]]) -> str:
    """As SVG, for light and dark pages."""
    both = list(panels(curves))
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PICTURE).render(
        title="Accuracy of two tasks under four samplers",
        panels=both,
        names=list(curves),
        seeds=min(len(by_seed) for by_seed in curves.values()),
        width=sum(panel.width for panel in both),
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path(__file__).parents[2] / "docs" / "samplers")
    given = parser.parse_args()
    curves = run_all(given.seeds, given.output.with_suffix(".json"))
    given.output.with_suffix(".svg").write_text(picture(curves), encoding="utf-8")
    print("\n".join(table(curves)))


if __name__ == "__main__":
    main()
