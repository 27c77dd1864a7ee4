"""The timeline of a run: its stages sum to the time that the run took, and its size is bounded."""

from __future__ import annotations

import json
from itertools import pairwise

import attrs
import pytest
from recording import record

from grpo_core.config import Config, TrackingConfig
from grpo_core.contracts.events import Span, TimelineExtended
from grpo_core.loop.timeline import GAP, MOST, Timeline, during, recorded_by, stage, take_spans


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def timeline(clock):
    return Timeline(clock)


def test_the_stages_of_the_loop_follow_one_another_without_a_gap(clock, timeline):
    for seconds, what in ((0.0, "start"), (2.0, "wait for groups"), (0.5, "step"), (1.0, "wait for groups")):
        clock.now += seconds
        timeline.stage(what)
    clock.now += 4.0
    first = timeline.take()
    clock.now += 3.0
    spans = [*first, *timeline.take()]
    assert [(span.what, span.busy) for span in spans] == [
        ("start", 2.0),
        ("wait for groups", 0.5),
        ("step", 1.0),
        ("wait for groups", 4.0),
        ("wait for groups", 3.0),
    ]
    assert sum(span.end - span.begin for span in spans) == clock.now
    assert all(one.end == other.begin for one, other in pairwise(spans))


def test_each_stage_is_reported_when_it_begins(clock):
    told = []
    timeline = Timeline(clock, tell=told.append)
    with recorded_by(timeline):
        stage("first weight sync")
        stage("wait for groups")
    assert told == ["first weight sync", "wait for groups"]


def test_calls_that_run_at_the_same_time_are_one_span(clock, timeline):
    with timeline.during("engine", "generate"):
        clock.now = 1.0
        with timeline.during("engine", "generate"):
            clock.now = 3.0
    clock.now = 5.0
    (span,) = timeline.take()
    assert (span.begin, span.end, span.busy, span.calls) == (0.0, 3.0, 3.0, 2)
    assert span.seconds == 5.0, "one of the calls takes three seconds, the other one two"


def test_what_still_runs_is_counted_until_now_and_continues(clock, timeline):
    with timeline.during("engine", "generate"):
        clock.now = 2.0
        (first,) = timeline.take()
        clock.now = 5.0
    (second,) = timeline.take()
    assert [(each.begin, each.end, each.calls) for each in (first, second)] == [(0.0, 2.0, 1), (2.0, 5.0, 0)]
    assert [each.seconds for each in (first, second)] == [2.0, 3.0]


def test_a_step_with_many_calls_has_few_spans_and_loses_no_time(clock, timeline):
    for _ in range(1000):
        with timeline.during("engine", "generate"):
            clock.now += 1.0
        clock.now += 2 * GAP
    spans = timeline.take()
    assert len(spans) == MOST
    assert sum(span.busy for span in spans) == pytest.approx(1000.0)
    assert sum(span.calls for span in spans) == 1000


def test_a_short_gap_is_within_a_span(clock, timeline):
    for _ in range(3):
        with timeline.during("environment sort", "evaluate"):
            clock.now += 1.0
        clock.now += GAP / 2
    (span,) = timeline.take()
    assert (span.busy, span.end) == (3.0, 3.0 + GAP)


def test_without_a_timeline_nothing_is_recorded(clock, timeline):
    stage("step")
    with during("trainer", "step"):
        clock.now = 1.0
    assert take_spans() == timeline.take() == ()
    with recorded_by(timeline), during("trainer", "step"):
        clock.now = 2.0
        (span,) = take_spans()
        assert (span.lane, span.what, span.begin, span.end) == ("trainer", "step", 1.0, 2.0)


def test_the_files_have_a_line_for_each_span_on_the_clock_of_the_wall(tmp_path):
    span = Span(lane="loop", what="step", begin=7.0, end=9.5, busy=2.5)
    config = Config(tracking=TrackingConfig(trackers=["files"]))
    run = record(tmp_path / "run", [TimelineExtended(step=3, spans=(span,), now=10.0)], config)
    (line,) = map(json.loads, (run.path / "timeline.jsonl").read_text().splitlines())
    assert attrs.asdict(span).keys() < line.keys()
    assert line["end"] - line["begin"] == pytest.approx(2.5, abs=1e-3)
    assert line["step"] == 3
    assert b"TimelineExtended" not in (run.path / "events.jsonl").read_bytes()
