"""Forecasts as a picture: a bar for the seconds of each step, and a few steps of each simulated run, as SVG.

Lightness, height and hatching tell the parts apart, also without their colors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import floor, log10
from pathlib import Path

from attrs import define, field

from grpo_core.errors import ConfigError
from grpo_core.inert import inert
from grpo_core.planning.forecast import WARM_UP
from grpo_core.planning.moments import Moments
from grpo_core.planning.tables import Row, best

WIDTH = 560
"""Width of the picture, in its own units."""
LEFT, RIGHT = 16, 16
"""Margins around the bars."""
LANE = 9
"""Height of a lane of a bar."""
SHOWN = 6
"""Number of steps that are shown of the slowest configuration; of the others, as many as end meanwhile."""
STYLE = """
svg { font: 14px sans-serif; }
.paper { fill: #fff; } text { fill: #222; } .grid { stroke: #ddd; fill: none; }
.frame { fill: none; stroke: #777; }
.generating { fill: #8fbde6; } .training { fill: #1c4f80; } .waiting { fill: url(#hatch); }
.hatch { stroke: #888; stroke-width: 1.5; }
.small { font-size: 12px; } .head { font-weight: bold; }
@media (prefers-color-scheme: dark) {
.paper { fill: #1e2129; } text { fill: #e3e5e8; } .grid { stroke: #3a3f4b; } .frame { stroke: #9aa0ab; }
.generating { fill: #3d6d99; } .training { fill: #b9dcfa; } .hatch { stroke: #9aa0ab; } }
"""
"""The picture has a background of its own, so that it can be read whichever colors the page has."""
HATCH = (
    '<defs><pattern id="hatch" width="5" height="5" patternUnits="userSpaceOnUse" '
    'patternTransform="rotate(45)"><path class="hatch" d="M0 0V5"/></pattern></defs>'
)
LONGEST_NAME = 60
"""Number of characters of a configuration's name that are drawn."""
KINDS = ("generating", "training", "waiting")


def check_writable(path: Path) -> None:
    """Raise ConfigError if the picture cannot be written to this file."""
    if path.suffix.lower() != ".svg":
        raise ConfigError(f"--picture {path}: the picture is an SVG file; give a name that ends in .svg")
    there = path.exists()
    try:
        with path.open("ab"):
            pass
        if not there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--picture {path}: cannot be written: {error.strerror}") from error


def write(path: Path, rows: Sequence[Row], compared: int) -> None:
    """Write the picture of the rows, the last ``compared`` of which are alternatives."""
    try:
        path.write_text(drawn(rows, compared), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--picture {path}: cannot be written: {error.strerror}") from error


def drawn(rows: Sequence[Row], compared: int) -> str:
    """Return the picture of the rows, the last ``compared`` of which are alternatives."""
    choice = best(rows[len(rows) - compared :]) if compared else None
    sheet = _Sheet()
    _bars(sheet, rows, choice)
    runs = _different([row for row in rows if row.moments is not None and row.moments.steps])
    if runs:
        _timelines(sheet, runs)
    told = "; ".join(f"{row.name}: {row.forecast.seconds_per_step:.3g} seconds per step" for row in rows)
    return sheet.svg(f"Forecasts: {told}")


@define
class _Sheet:
    """Collects the parts of the picture from top to bottom."""

    parts: list[str] = field(factory=list)
    y: float = 8.0
    """Where the next part begins."""

    def text(
        self, x: float, words: str, kind: str = "", *, below: float = 0.0, anchor: str = "start"
    ) -> None:
        place = f'x="{x:.1f}" y="{self.y + below:.1f}" text-anchor="{anchor}"'
        self.parts.append(f'<text {place} class="{kind}">{escape(inert(words))}</text>')

    def box(self, x: float, wide: float, high: float, kind: str, *, below: float = 0.0) -> None:
        size = f'width="{max(wide, 0.0):.1f}" height="{high:.1f}"'
        self.parts.append(f'<rect x="{x:.1f}" y="{self.y + below:.1f}" {size} class="{kind}"/>')

    def path(self, points: Iterable[tuple[float, float]], kind: str) -> None:
        drawn = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        self.parts.append(f'<path class="{kind}" d="M{drawn}Z"/>')

    def axis(self, most: float, scale: float, top: float) -> None:
        """Draw lines at round seconds from a place down to here, and write the seconds below them."""
        power = 10.0 ** floor(log10(max(most, 1e-9) / 6))
        each = next(m * power for m in (1, 2, 5, 10) if m * power >= most / 6)
        for tick in (place * each for place in range(int(most / each) + 2)):
            x = LEFT + tick * scale
            if x > WIDTH - RIGHT + 0.5:
                continue
            self.parts.insert(0, f'<path class="grid" d="M{x:.1f} {top:.1f}V{self.y:.1f}"/>')
            unit = " s" if not tick else ""
            self.text(x, f"{tick:g}{unit}", "small", below=14, anchor="start" if not tick else "middle")
        self.y += 24

    def svg(self, title: str) -> str:
        size = f'viewBox="0 0 {WIDTH} {self.y:g}"'
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
            f"<title>{escape(inert(title))}</title>",
            f"<style>{STYLE}</style>",
            HATCH,
            f'<rect class="paper" width="{WIDTH}" height="{self.y:g}"/>',
            *self.parts,
            "</svg>",
        ]
        return "\n".join(lines) + "\n"


def _bars(sheet: _Sheet, rows: Sequence[Row], choice: Row | None) -> None:
    """Draw the seconds of a step: above those of generation, below those of the trainer and of its waits."""
    sheet.text(LEFT, "Seconds per step", "head", below=14)
    x = LEFT
    for kind, words in zip(KINDS, ("rollouts are played", "training", "training waits"), strict=True):
        sheet.box(x, 12, LANE, kind, below=24)
        sheet.text(x + 17, words, "small", below=33)
        x += 35 + 7 * len(words)
    sheet.y += 48
    top = sheet.y
    most = max(row.forecast.seconds_per_step for row in rows)
    scale = (WIDTH - LEFT - RIGHT) / max(most, 1e-9)
    for row in rows:
        its = row.forecast
        wide = its.seconds_per_step * scale
        sheet.text(LEFT, _name(row) + (" (best)" if row is choice else ""), "small", below=13)
        sheet.text(WIDTH - RIGHT, f"{its.seconds_per_step:.3g} s", "small head", below=13, anchor="end")
        sheet.box(LEFT, wide * its.generating, LANE, "generating", below=18)
        sheet.box(LEFT, wide * its.training, LANE, "training", below=18 + LANE)
        waiting = min(its.waiting, 1 - its.training)
        sheet.box(LEFT + wide * its.training, wide * waiting, LANE, "waiting", below=18 + LANE)
        sheet.box(LEFT, wide, 2 * LANE, "frame", below=18)
        sheet.y += 18 + 2 * LANE + 6
    sheet.axis(most, scale, top)


def _name(row: Row) -> str:
    return row.name if len(row.name) <= LONGEST_NAME else row.name[: LONGEST_NAME - 1] + "…"


def _different(rows: Sequence[Row]) -> list[Row]:
    """Return the rows without those that show the same run as one before them."""
    found: list[Row] = []
    for row in rows:
        if all(row.moments is not other.moments for other in found):
            found.append(row)
    return found


def _timelines(sheet: _Sheet, rows: Sequence[Row]) -> None:
    """Draw some steps of each run: above, how many groups are being generated; below, the steps."""
    runs = [row.moments for row in rows if row.moments is not None]
    begins = [_begin(run) for run in runs]
    length = max(_end(run) - begin for run, begin in zip(runs, begins, strict=True))
    most = max(count for run in runs for _, count in run.generating)
    scale = (WIDTH - LEFT - RIGHT) / max(length, 1e-9)
    sheet.y += 6
    sheet.text(LEFT, "Steps of the simulated runs", "head", below=14)
    sheet.text(
        LEFT, "Height: groups that are being generated. Below: training of each step.", "small", below=32
    )
    sheet.y += 42
    top = sheet.y
    for row, run, begin in zip(rows, runs, begins, strict=True):
        sheet.text(LEFT, _name(row), "small", below=13)
        sheet.y += 18
        _groups(sheet, run, begin, begin + length, scale, 26 / most)
        for step in run.steps:
            if step.trained > begin and step.begin < begin + length:
                first, last = max(step.begin, begin), min(step.trained, begin + length)
                sheet.box(
                    LEFT + (first - begin) * scale, (last - first) * scale - 1, LANE, "training", below=28
                )
        sheet.y += 28 + LANE + 6
    sheet.axis(length, scale, top)


def _begin(run: Moments) -> float:
    """Return the end of the warm-up."""
    return run.steps[WARM_UP - 1].end if len(run.steps) > 2 * WARM_UP else 0.0


def _end(run: Moments) -> float:
    """Return the end of the last step that is shown of the slowest run."""
    first = WARM_UP if len(run.steps) > 2 * WARM_UP else 0
    return run.steps[min(len(run.steps), first + SHOWN) - 1].end


def _groups(sheet: _Sheet, run: Moments, begin: float, end: float, scale: float, high: float) -> None:
    """Draw the number of groups as an area, ``high`` units for each."""
    bottom = sheet.y + 26
    last = min(end, run.steps[-1].end)
    before = next((count for at, count in reversed(run.generating) if at <= begin), 0)
    points: list[tuple[float, float]] = [(LEFT, bottom), (LEFT, bottom - before * high)]
    for at, count in run.generating:
        if begin < at < last:
            x = LEFT + (at - begin) * scale
            points += [(x, bottom - before * high), (x, bottom - count * high)]
            before = count
    x = LEFT + (last - begin) * scale
    sheet.path([*points, (x, bottom - before * high), (x, bottom)], "generating")
