"""Trains the demos of several turns with three seeds each and draws docs/learning_curves.svg.

    python docs/_learning_curves.py [--seeds 3]

About five minutes on two quiet cores.  What is measured is kept in docs/learning_curves.json, seed by seed: a
second call goes on where the first was interrupted; remove the file to begin anew.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from html import escape
from pathlib import Path
from statistics import fmean

from grpo_plugin_report.charts import HEIGHT, WIDTH, Chart, Series, chart

DOCS = Path(__file__).parent
EXAMPLES = DOCS.parent / "examples"
NUMBERS, PICTURE = DOCS / "learning_curves.json", DOCS / "learning_curves.svg"
GRPO = Path(sys.executable).with_name("grpo-core")
DEMOS = {
    "arrivals": "arrivals: digits arrive one by one, and are put in order in each of four turns",
    "calculator": "calculator: products of two-digit numbers, with a tool that multiplies",
}
COLOURS = ("#1f77b4", "#d1495b", "#3a7d44", "#8e6c8a", "#b07d2b")
TITLE = 26
"""Height of a chart's title."""

Curve = list[tuple[int, float]]
"""Step, and validation accuracy after it."""


def trained(demo: str, seed: int) -> Curve:
    """One run of a demo, as its example says."""
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / demo
        settings = ["--set", f"seed={seed}", "--set", "checkpoint.every=0"]
        command = [GRPO, "train", EXAMPLES / f"{demo}.toml", "--output", run, *settings]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
        name = f"validation/{demo}/accuracy"
        return [(row["step"], row[name]) for row in rows if name in row]


def measure(seeds: int) -> dict[str, dict[str, Curve]]:
    """By demo and seed; those that are known already are not trained again."""
    curves: dict[str, dict[str, Curve]] = json.loads(NUMBERS.read_text()) if NUMBERS.exists() else {}
    for demo in DEMOS:
        known = curves.setdefault(demo, {})
        for seed in range(seeds):
            if str(seed) not in known:
                known[str(seed)] = trained(demo, seed)
                NUMBERS.write_text(json.dumps(curves) + "\n")
            (_, first), *_, (step, last) = known[str(seed)]
            print(f"{demo}, seed {seed}: {first:.1%} -> {last:.1%} in {step} steps", flush=True)
    return curves


def drawn(demo: str, curves: dict[str, Curve]) -> Chart:
    """A faint line for each seed, and their mean."""
    mean = [(points[0][0], fmean(y for _, y in points)) for points in zip(*curves.values(), strict=False)]
    lines = [Series(name=f"seed {seed}", points=c, colour=1, style="faint") for seed, c in curves.items()]
    mean_line = Series(name=f"mean of {len(curves)} seeds", points=mean, style="dots")
    made = chart(DEMOS[demo], [*lines, mean_line], percent=True, low=0.0, high=1.0)
    assert made is not None
    return made


def svg(charts: list[Chart], note: str) -> str:
    """The charts, one below the other, each with a note."""
    each = HEIGHT + TITLE
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {each * len(charts)}" '
        'font-family="sans-serif" font-size="10">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for place, one in enumerate(charts):
        parts += [f'<g transform="translate(0 {each * place})">', *_elements(one, note), "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def _elements(one: Chart, note: str) -> list[str]:
    parts = [f'<text x="{one.left}" y="17" font-weight="bold">{escape(one.title)}</text>']
    parts += [f'<g transform="translate(0 {TITLE - 10})">']
    for y, text in one.y_ticks:
        parts += [f'<path d="M{one.left} {y}H{one.width - 12}" stroke="#ddd"/>']
        parts += [f'<text x="{one.left - 5}" y="{y + 3}" text-anchor="end">{escape(text)}</text>']
    for x, text in one.x_ticks:
        parts += [f'<text x="{x}" y="{one.height - 8}" text-anchor="middle">{escape(text)}</text>']
    for series, line, marks in zip(one.series, one.lines, one.marks, strict=True):
        colour = COLOURS[series.colour % len(COLOURS)]
        strength = 'stroke-opacity="0.35"' if series.style == "faint" else 'stroke-width="2"'
        parts += [f'<path d="{line}" fill="none" stroke="{colour}" {strength}/>']
        parts += [f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>' for x, y in marks]
    parts += [f'<text x="{one.width - 14}" y="{one.height - 34}" text-anchor="end">{escape(note)}</text>']
    return [*parts, "</g>"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    seeds = parser.parse_args().seeds
    curves = measure(seeds)
    note = f"validation accuracy by step: mean of {seeds} seeds; faint: each seed"
    PICTURE.write_text(svg([drawn(demo, curves[demo]) for demo in DEMOS], note))
    print(f"drawn: {PICTURE}")


if __name__ == "__main__":
    main()
