"""The timeline of a run: who did what when, on the event loop's clock.

A *lane* is who: the loop, the trainer, an engine, the environment of a task.  Overlapping calls in a lane are
one span with the number of calls, and spans with a short gap between them are joined, so that a step has few
spans for any number of calls.  The stages of the loop follow one another without a gap: their times sum to
the time of the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

from attrs import define, field

from grpo_core.contracts.events import LOOP, Span, TimelineExtended

GAP = 0.005
"""Largest gap in seconds between two spans that are joined; the ``busy`` time excludes the gap."""
MOST = 20
"""Largest number of spans of a lane in a step; later ones are joined to the last."""


@define
class Activity:
    """Adds up the calls in a lane; a call is a block inside this context."""

    lane: str
    what: str
    clock: Callable[[], float] = lambda: asyncio.get_running_loop().time()
    spans: list[Span] = field(factory=list)
    """Spans that have ended since the last ``take``."""
    running: int = 0
    calls: int = 0
    since: float = 0.0
    """Start of the current span, if something is running."""
    seconds: float = 0.0
    """Total seconds of the calls in the current span, until ``at``."""
    at: float = 0.0

    def __enter__(self) -> None:
        self.enter(self.clock())

    def __exit__(self, *error: object) -> None:
        self.leave(self.clock())

    def enter(self, now: float) -> None:
        if self.running == 0:
            self.since = now
        self._add_up(now)
        self.running += 1
        self.calls += 1

    def leave(self, now: float) -> None:
        self._add_up(now)
        self.running -= 1
        if self.running == 0:
            self._end(now)

    def _add_up(self, now: float) -> None:
        self.seconds += self.running * (now - self.at)
        self.at = now

    def take(self, now: float) -> list[Span]:
        """Return the spans until now; running calls continue in the next ones."""
        if self.running and now > self.since:
            self._add_up(now)
            self._end(now)
            self.since = now
        spans, self.spans = self.spans, []
        return spans

    def _end(self, now: float) -> None:
        calls, self.calls = self.calls, 0
        seconds, self.seconds = self.seconds, 0.0
        last = self.spans[-1] if self.spans else None
        if last is not None and (self.since - last.end < GAP or len(self.spans) >= MOST):
            self.spans.pop()
            begin, busy, calls = last.begin, last.busy + now - self.since, last.calls + calls
            seconds += last.seconds
        else:
            begin, busy = self.since, now - self.since
        self.spans.append(
            Span(
                lane=self.lane, what=self.what, begin=begin, end=now, busy=busy, calls=calls, seconds=seconds
            )
        )


@define
class Timeline:
    """Records who does what when."""

    clock: Callable[[], float] = lambda: asyncio.get_running_loop().time()
    tell: Callable[[str], None] = lambda stage: None
    """Receives the name of each stage of the loop when it begins."""
    _activities: dict[tuple[str, str], Activity] = field(init=False, factory=dict)
    _stage: Activity = field(init=False, factory=lambda: Activity(LOOP, ""))
    _stages: list[Span] = field(init=False, factory=list)

    def during(self, lane: str, what: str) -> Activity:
        """Record a lane's activity inside this context."""
        return self._activities.setdefault((lane, what), Activity(lane, what, self.clock))

    def stage(self, what: str) -> None:
        """Record that the loop enters another stage."""
        now = self.clock()
        self._stages += self._stage.take(now)
        self._stage = Activity(LOOP, what)
        self._stage.enter(now)
        self.tell(what)

    def take(self) -> tuple[Span, ...]:
        """Return the spans since the last call, in the order of their lanes and times."""
        now = self.clock()
        stages, self._stages = self._stages + self._stage.take(now), []
        others = [span for activity in self._activities.values() for span in activity.take(now)]
        return (*stages, *sorted(others, key=lambda span: (span.lane, span.begin)))

    def extended(self, step: int) -> TimelineExtended:
        """Return the event with the spans since the last call of ``take``."""
        return TimelineExtended(step=step, spans=self.take(), now=self.clock())


_current: ContextVar[Timeline | None] = ContextVar("timeline", default=None)
_NOTHING = nullcontext()


@contextmanager
def recorded_by(timeline: Timeline) -> Iterator[None]:
    """Let ``during`` of this context, and of all tasks that it starts, record in this timeline."""
    token = _current.set(timeline)
    try:
        yield
    finally:
        _current.reset(token)


def during(lane: str, what: str) -> AbstractContextManager[None]:
    """Record a lane's activity inside this context, if there is a timeline."""
    timeline = _current.get()
    return _NOTHING if timeline is None else timeline.during(lane, what)


def stage(what: str) -> None:
    """Record that the loop enters another stage, if there is a timeline."""
    if (timeline := _current.get()) is not None:
        timeline.stage(what)


def take_spans() -> tuple[Span, ...]:
    """Return the spans of the timeline since the last call; none if there is no timeline."""
    timeline = _current.get()
    return () if timeline is None else timeline.take()
