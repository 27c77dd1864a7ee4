"""The timeline of a run as geometry: the activity of each lane over the run and in some steps.  Pure.

Times between a stop and the next start, and of starting, are left out.  A lane is drawn in a view of
``WIDTH`` by ``HEIGHT``, which a page stretches.  Work has the full height and waiting is thin, so that they
are distinguishable without colours.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attrs import define, field, frozen

LOOP = "loop"
"""The lane of the loop itself."""
WIDTH, HEIGHT = 1000, 20
"""Size of the view of a lane, in its units."""
COLUMNS = 250
"""Number of columns over the time of the run; each shows the share in which a lane was busy."""
CHARACTER = 1.9
"""Width of a label's character, in percent of the narrowest view (350 px)."""
ZOOMED = 4
"""Number of steps in a view that shows each span."""
MOST_SPANS = 800
"""Largest number of spans in such a view."""
THIN = 5
"""Height of spans without work."""
KINDS = ("generation", "environments", "training", "sync", "validation", "other", "wait")
"""The kinds of spans, in the order of a column."""
BY_LANE = {
    "engine": "generation",
    "environment": "environments",
    "trainer": "training",
    "sync": "sync",
    "validation": "validation",
}
BY_STAGE = {
    "step": "training",
    "publish": "sync",
    "first weight sync": "sync",
    "first validation": "validation",
}
"""Kinds of the loop's stages, except waits and the kind ``other``."""
STARTING = "start"
PARTS = "trainer, parts of steps"
"""Lane of the parts of the trainer's steps."""
PART = "step: "
"""Prefix of the names of parts of steps in the trainer's lane."""

Row = Mapping[str, Any]
Life = tuple[int, int]
"""The index of a start of the run, and a step."""


@frozen
class Span:
    """A line of the timeline."""

    life: int
    step: int
    lane: str
    what: str
    begin: float
    end: float
    busy: float

    @property
    def share(self) -> float:
        """The share of its time in which the lane was busy."""
        return min(1.0, self.busy / (self.end - self.begin)) if self.end > self.begin else 0.0

    @property
    def kind(self) -> str:
        """One of ``KINDS``."""
        if self.what.startswith("wait"):
            return "wait"
        if self.lane == LOOP:
            return BY_STAGE.get(self.what, "other")
        return BY_LANE.get(self.lane.split(" ", 1)[0].split(",", 1)[0], "other")


@frozen
class Drawn:
    """A lane with its geometry."""

    name: str
    busy: str
    """Description of the share of the time in which the lane was busy."""
    paths: tuple[tuple[str, str], ...] = ()
    """Kinds and SVG paths."""
    spans: tuple[tuple[str, float, float, float, str], ...] = ()
    """Kind, position, width, height and meaning of each span."""


@frozen
class View:
    """The lanes in an interval of a run's time."""

    title: str
    lanes: tuple[Drawn, ...]
    marks: tuple[tuple[float, str], ...]
    """Positions of labels in percent, and the labels."""
    opened: bool = True


@define
class Clock:
    """Maps times to seconds of activity of the run."""

    begins: list[float] = field(factory=list)
    """Start times of active intervals."""
    before: list[float] = field(factory=list)
    """Seconds of activity before each of them."""
    seconds: float = 0.0

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Clock:
        clock, last = cls(), None
        for span in sorted(spans, key=lambda one: one.begin):
            if last is None or span.begin > last + 0.01:
                clock.begins.append(span.begin)
                clock.before.append(clock.seconds)
                last = span.begin
            clock.seconds += max(0.0, span.end - last)
            last = max(last, span.end)
        return clock

    def at(self, time: float) -> float:
        """Return the seconds of activity before a time; within a gap, before its end."""
        position = max(0, bisect_right(self.begins, time) - 1)
        end = self.before[position + 1] if position + 1 < len(self.before) else self.seconds
        return min(end, max(self.before[position], self.before[position] + time - self.begins[position]))


def spans(rows: Iterable[Row]) -> list[Span]:
    """Return the spans of a timeline, without invalid lines."""
    found, life = [], 0
    for row in rows:
        begin, end, busy = (_seconds(row.get(name)) for name in ("begin", "end", "busy"))
        lane, what, step = row.get("lane"), row.get("what"), row.get("step")
        if begin is None or end is None or busy is None:
            continue
        if not (isinstance(step, int) and isinstance(lane, str) and isinstance(what, str)):
            continue
        if lane == LOOP and what == STARTING:
            life += 1
        if lane == "trainer" and what.startswith(PART):
            lane, what = PARTS, what.removeprefix(PART)
        found.append(Span(life, step, lane, what, begin, max(begin, end), max(0.0, busy)))
    return found


def _seconds(value: Any) -> float | None:
    """Return a time, or None for anything else."""
    return float(value) if isinstance(value, int | float) and abs(value) < 1e12 else None


def views(found: Sequence[Span]) -> list[View]:
    """Return a view of the whole run, and views of some of its steps; none without a step."""
    stages = [span for span in found if span.lane == LOOP and span.what != STARTING]
    clock = Clock.of(stages)
    if not clock.seconds:
        return []
    ranges: dict[Life, tuple[float, float]] = {}
    for span in stages:
        begin, end = ranges.get((span.life, span.step), (span.begin, span.end))
        ranges[span.life, span.step] = (min(begin, span.begin), max(end, span.end))
    steps = sorted(ranges)
    if len(steps) <= ZOOMED:
        return [_zoomed(found, clock, ranges, steps, "Steps")]
    newest = steps[-ZOOMED:]
    slowest = max(steps, key=lambda step: clock.at(ranges[step][1]) - clock.at(ranges[step][0]))
    position = min(max(0, steps.index(slowest) - 1), len(steps) - ZOOMED)
    around = steps[position : position + ZOOMED]
    made = [_overview(found, clock, ranges, steps), _zoomed(found, clock, ranges, newest, "Newest steps,")]
    if around != newest:
        made.append(_zoomed(found, clock, ranges, around, f"Slowest step, {slowest[1]}, among", opened=False))
    return made


# ---------------------------------------------------------------------------------- the two kinds of views


def _overview(
    found: Sequence[Span], clock: Clock, ranges: Mapping[Life, tuple[float, float]], steps: Sequence[Life]
) -> View:
    """Draw for each lane the share of each column in which it was busy."""
    width = clock.seconds / COLUMNS
    columns: dict[str, dict[str, list[float]]] = {}
    for span in found:
        if (span.lane, span.what) == (LOOP, STARTING) or span.lane == PARTS:
            continue
        kinds = columns.setdefault(span.lane, {})
        filled = kinds.setdefault(span.kind, [0.0] * COLUMNS)
        begin, end = clock.at(span.begin) / width, clock.at(span.end) / width
        for column in range(int(begin), min(COLUMNS, int(end) + 1)):
            filled[column] += span.share * max(0.0, min(end, column + 1) - max(begin, column))
    lanes = tuple(
        Drawn(lane, _busy(kinds, COLUMNS), paths=tuple(_stacked(kinds)))
        for lane, kinds in sorted(columns.items(), key=lambda one: _order(one[0]))
    )
    each = max(1, len(steps) // 6)
    marks = [(clock.at(ranges[step][0]) / clock.seconds * 100, f"{step[1]}") for step in steps[::each]]
    return View(f"The whole run, {duration(clock.seconds)}", lanes, tuple(_apart(marks)))


def _stacked(kinds: Mapping[str, Sequence[float]]) -> Iterable[tuple[str, str]]:
    """Yield the SVG path of each kind: columns stacked on the earlier kinds."""
    below, wide = [0.0] * COLUMNS, WIDTH / COLUMNS
    for kind in KINDS:
        if kind not in kinds:
            continue
        parts = []
        for column, share in enumerate(kinds[kind]):
            top = min(1.0, below[column] + (share * THIN / HEIGHT if kind == "wait" else share))
            if top - below[column] > 0.005:
                bottom, high = HEIGHT * (1 - below[column]), HEIGHT * (top - below[column])
                parts.append(f"M{column * wide:g} {bottom:.3g}v-{high:.3g}h{wide:g}v{high:.3g}z")
            below[column] = top
        yield kind, "".join(parts)


def _zoomed(
    found: Sequence[Span],
    clock: Clock,
    ranges: Mapping[Life, tuple[float, float]],
    steps: Sequence[Life],
    title: str,
    *,
    opened: bool = True,
) -> View:
    """Draw each span of some steps."""
    first, last = ranges[steps[0]][0], max(ranges[step][1] for step in steps)
    origin, length = clock.at(first), max(1e-9, clock.at(last) - clock.at(first))
    lanes: dict[str, list[Span]] = {}
    shown = [one for one in found if one.end > first and one.begin < last and one.what != STARTING]
    for span in sorted(shown, key=lambda one: one.begin - one.end)[:MOST_SPANS]:  # the longest
        lanes.setdefault(span.lane, []).append(span)

    def position(time: float) -> float:
        return min(WIDTH, max(0.0, (clock.at(time) - origin) / length * WIDTH))

    drawn = []
    for lane, its in sorted(lanes.items(), key=lambda one: _order(one[0])):
        bars = []
        busy: dict[str, list[float]] = {}
        for span in sorted(its, key=lambda one: one.begin):
            left, right = position(span.begin), position(span.end)
            meaning = f"{span.what}: {duration(span.end - span.begin)}, step {span.step}"
            high = THIN if span.kind == "wait" else HEIGHT
            bars.append((span.kind, round(left, 2), round(max(0.6, right - left), 2), high, meaning))
            busy.setdefault(span.kind, []).append((right - left) / WIDTH * span.share)
        drawn.append(Drawn(lane, _busy(busy, 1), spans=tuple(bars)))
    marks = [(position(ranges[step][0]) / WIDTH * 100, f"{step[1]}") for step in steps]
    numbers = f"{steps[0][1]} to {steps[-1][1]}" if len(steps) > 1 else f"{steps[0][1]}"
    return View(f"{title} {numbers}, {duration(length)}", tuple(drawn), tuple(_apart(marks)), opened)


def _busy(kinds: Mapping[str, Sequence[float]], columns: int) -> str:
    """Describe the share of the time in which a lane was busy, without waits."""
    share = sum(sum(filled) for kind, filled in kinds.items() if kind != "wait") / columns
    return f"{min(1.0, share):.0%} busy"


def _order(lane: str) -> tuple[int, str]:
    """Return the sort key of a lane: the order of the data flow."""
    names = ("engine", "environment", LOOP, "trainer", "sync", "validation")
    first = lane.split(" ", 1)[0].split(",", 1)[0]
    return (names.index(first) if first in names else len(names), lane)


def _apart(marks: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
    """Return the marks, the first one as "step N", without labels that would overlap on a narrow screen."""
    kept: list[tuple[float, str]] = []
    end = 0.0
    for position, number in marks:
        text = number if end else f"step {number}"
        free = end <= position <= 100 - CHARACTER * len(text)
        end = position + CHARACTER * (len(text) + 2) if free else end
        kept.append((round(position, 2), text if free else ""))
    return kept


def duration(seconds: float) -> str:
    """Format a time in a few digits: ``3 h 05 min``, ``2 min 10 s``, ``1.52 s``, ``12 ms``."""
    if seconds >= 3600:
        return f"{seconds // 3600:.0f} h {seconds % 3600 // 60:02.0f} min"
    if seconds >= 120:
        return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s"
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"
