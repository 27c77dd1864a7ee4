"""Line charts as geometry: scales, ticks and points in a fixed view.  Pure.

A template renders the geometry as SVG and escapes every text.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Literal

from attrs import evolve, frozen

from grpo_core.processes.secrets import inert
from grpo_plugin_report.values import LARGEST

WIDTH, HEIGHT = 480, 200
"""Size of the view, in its units."""
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 24
"""Margins around the plot area."""
MARK_ROOM = 12
"""Additional right margin for the letters of lines."""
MARK_HEIGHT = 14
"""Smallest vertical distance of two letters."""
SMOOTH = 40
"""Number of parts of a long line; each smoothed point is the mean over two such parts."""
MOST_POINTS = 150
"""Largest number of points of a line; longer lines are drawn through means of neighbouring points."""

Point = tuple[float, float]
Style = Literal["line", "thin", "dots"]


@frozen(kw_only=True)
class Series:
    """A line; a non-finite ``y`` is a gap."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    """Index of the colour in the template's palette."""
    style: Style = "line"
    """``thin`` lines are behind the others and without legend, ``dots`` marks points."""
    band: Sequence[tuple[float, float, float]] = ()
    """Step, lower and upper end of intervals, drawn as an area."""
    mark: str = ""
    """Letter at the end of the line, which identifies it without colour."""


@frozen(kw_only=True)
class Chart:
    """A chart in coordinates of the view."""

    title: str
    note: str
    series: tuple[Series, ...]
    """Series with at most ``MOST_POINTS`` points each."""
    lines: tuple[str, ...]
    """SVG path of each series; long lines are smoothed."""
    raw: tuple[str, ...]
    """SVG path of each long line without smoothing, drawn faintly; empty for other series."""
    areas: tuple[str, ...]
    """SVG path around the band of each series; empty without a band."""
    marks: tuple[tuple[Point, ...], ...]
    """Marked points of each series, such as the only point of a line."""
    letters: tuple[tuple[Point, str, int], ...]
    """Position, text and colour of each letter."""
    x_ticks: tuple[tuple[float, str], ...]
    """Position and label of each tick."""
    y_ticks: tuple[tuple[float, str], ...]
    x_range: Point
    percent: bool = False
    left: int = LEFT
    right: int = RIGHT
    width: int = WIDTH
    height: int = HEIGHT


def readings(chart: Chart) -> dict[str, Any]:
    """Return steps and values of each series as JSON values, for the page's cursor."""
    return {
        "width": WIDTH,
        "x": chart.x_range,
        "plane": (LEFT, WIDTH - chart.right),
        "series": [
            (
                inert(one.name),
                [round(p[0]) for p in known],
                [_reading(p, one, chart.percent) for p in known],
            )
            for one in chart.series
            if one.style != "thin" and (known := [p for p in one.points if _known(p, one)])
        ],
    }


def chart(
    title: str,
    series: Sequence[Series],
    *,
    note: str = "",
    percent: bool = False,
    low: float | None = None,
    high: float | None = None,
    clipped: bool = False,
) -> Chart | None:
    """Return the chart of all series with a point, or None if there are none.

    Args:
        title, note: title, and an explanation.
        series: the series in drawing order.
        percent: whether values are shares, labelled in percent.
        low, high: values that the range of ``y`` must include.
        clipped: whether bands may be cut at the edge; otherwise the range of ``y`` includes them.
    """
    series = [shortened(one) for one in series]
    series = [one for one in series if any(_known(p, one) for p in one.points)]
    if not series:
        return None
    xs = [x for one in series for x, _ in one.points]
    ys = [p[1] for one in series for p in one.points if _finite(p)]
    ys += [] if clipped and ys else [y for one in series for _, *ends in one.band for y in ends]
    ys += [y for y in (low, high) if y is not None]
    x_ticks = ticks(min(xs), max(xs), 6, whole=True)
    y_ticks = ticks(min(ys), max(ys), 4)
    x_range = (min(xs), max(max(xs), min(xs) + 1))
    y_range = (min(min(ys), y_ticks[0]), max(max(ys), y_ticks[-1]))
    right = RIGHT + (MARK_ROOM if any(one.mark for one in series) else 0)

    def view(point: Point) -> Point:
        x, y = point[0], min(max(point[1], y_range[0]), y_range[1])
        across = (WIDTH - LEFT - right) * (x - x_range[0]) / (x_range[1] - x_range[0])
        up = (HEIGHT - TOP - BOTTOM) * (y - y_range[0]) / (y_range[1] - y_range[0])
        return round(LEFT + across, 1), round(HEIGHT - BOTTOM - up, 1)

    def path(points: Sequence[Point]) -> str:
        return _path([view(p) if _finite(p) else None for p in points])

    reaches = [0 if one.mark or one.style != "line" else len(one.points) // SMOOTH for one in series]
    return Chart(
        title=title,
        note=note,
        series=tuple(series),
        lines=tuple(path(smoothed(one.points, reach)) for one, reach in zip(series, reaches, strict=True)),
        raw=tuple(path(one.points) if reach else "" for one, reach in zip(series, reaches, strict=True)),
        areas=tuple(_area(one.band, view) for one in series),
        marks=tuple(
            known if one.style == "dots" or len(known) == 1 else ()
            for one in series
            for known in (tuple(view(p) for p in one.points if _finite(p)),)
        ),
        letters=_letters(series, view),
        right=right,
        x_ticks=tuple((view((x, 0))[0], label(x)) for x in x_ticks),
        y_ticks=tuple((view((0, y))[1], label(y, percent)) for y in y_ticks),
        x_range=x_range,
        percent=percent,
    )


def _letters(series: Sequence[Series], view: Callable[[Point], Point]) -> tuple[tuple[Point, str, int], ...]:
    """Return position, text and colour of the letters at the ends of lines, without overlaps."""
    ends = [
        (view(next(point for point in reversed(one.points) if _finite(point))), one.mark, one.colour)
        for one in series
        if one.mark and any(map(_finite, one.points))
    ]
    ends.sort(key=lambda end: end[0][1])
    heights, height = [], min(MARK_HEIGHT, (HEIGHT - TOP - BOTTOM) / max(1, len(ends)))
    least = float(TOP)
    for (_, y), _, _ in ends:
        heights.append(max(y, least))
        least = heights[-1] + height
    most = float(HEIGHT - BOTTOM)
    for i in reversed(range(len(ends))):  # move letters below the chart up again
        heights[i] = round(min(heights[i], most), 1)
        most = heights[i] - height
    return tuple(((x, y), text, colour) for ((x, _), text, colour), y in zip(ends, heights, strict=True))


def shortened(series: Series, most: int = MOST_POINTS) -> Series:
    """Return the series with at most ``most`` points, which are means of equally many neighbours."""
    band = [row for row in series.band if all(_finite((row[0], y)) for y in row[1:])]
    points = series.points
    if len(points) <= most:
        return evolve(series, band=band)
    each = math.ceil(len(points) / most)
    means = []
    for begin in range(0, len(points), each):
        part = [p for p in points[begin : begin + each] if _finite(p)]
        if part:
            means.append((sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)))
    parts = [band[at : at + each] for at in range(0, len(band), each)]
    bands = [(fmean(x for x, _, _ in p), fmean(y for _, y, _ in p), fmean(z for _, _, z in p)) for p in parts]
    return evolve(series, points=means, band=bands)


def smoothed(points: Sequence[Point], reach: int) -> list[Point]:
    """Replace each point's ``y`` by the mean over the neighbours at a distance of at most ``reach``."""
    smooth = []
    for index, (x, _) in enumerate(points):
        near = [p[1] for p in points[max(0, index - reach) : index + reach + 1] if _finite(p)]
        smooth.append((x, sum(near) / len(near) if near else math.nan))
    return smooth


def ticks(low: float, high: float, about: int, *, whole: bool = False) -> list[float]:
    """Return round numbers with a spacing of 1, 2 or 5 times a power of ten that enclose the range.

    With ``whole``, they are integers inside of the range.
    """
    least = 1e-9 * max(abs(low), abs(high))  # smaller differences are rounding errors
    if high - low <= least:
        high = low + max(1.0, abs(low))
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(step for m in (1, 2, 5, 10) if (step := m * power) >= raw * (1 - 1e-9))
    if whole:
        step = max(1.0, step)
        first, last = math.ceil(low / step), math.floor(high / step)
    else:
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)] or [low]


def label(value: float, percent: bool = False) -> str:
    """Format a number in a few characters: ``1.2M``, ``30k``, ``0.05``, ``4e-4``, ``40%``."""
    if percent:
        return f"{value * 100:.3g}%"
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * size or (abs(value) >= size and unit != "k"):
            return f"{value / size:.3g}{unit}"
    if 0 < abs(value) < 1e-3:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _path(points: Sequence[Point | None]) -> str:
    """Return the SVG path through points, with a new start after each gap."""
    parts, pen = [], "M"
    for point in points:
        if point is None:
            pen = "M"
            continue
        parts.append(f"{pen}{point[0]:g} {point[1]:g}")
        pen = "L"
    return "".join(parts)


def _area(band: Sequence[tuple[float, float, float]], view: Callable[[Point], Point]) -> str:
    """Return the SVG path along the lower ends and back along the upper ends."""
    around = [view((x, low)) for x, low, _ in band] + [view((x, high)) for x, _, high in reversed(band)]
    return _path(around) + "Z" if len(band) > 1 else ""


def _reading(point: Point, series: Series, percent: bool) -> str:
    """Format a point's value, with its interval if it has one."""
    ends = next(((low, high) for x, low, high in series.band if x == point[0]), None)
    interval = f"{label(ends[0], percent)} to {label(ends[1], percent)}" if ends else ""
    if not _finite(point):
        return f"{interval}, no score"
    return label(point[1], percent) + (f" ({interval})" if interval else "")


def _known(point: Point, series: Series) -> bool:
    """Whether a point has a value or an interval."""
    return _finite(point) or any(x == point[0] for x, *_ in series.band)


def _finite(point: Point) -> bool:
    return abs(point[1]) <= LARGEST  # false for NaN, too
