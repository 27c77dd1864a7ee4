"""The timeline on the page of a run: lanes over the whole run, and each span of some steps."""

from __future__ import annotations

import json
import re

import pytest
import webdriver
from hypothesis import given
from hypothesis import strategies as st

from grpo_plugin_report import lanes, report
from grpo_plugin_report.lanes import Clock, Span, views


def span(lane, what, begin, end, *, step=1, busy=None, life=0):
    busy = end - begin if busy is None else busy
    return Span(life, step, lane, what, begin, end, busy)


def rows(steps, start=1000.0, first=1):
    """Return the lines of a run: in each step a second of waiting and a second of training."""
    lines = [
        {"step": first, "lane": "loop", "what": "start", "begin": start, "end": start + 50, "busy": 50.0}
    ]
    now = start + 50
    for step in range(first, first + steps):
        for lane, what, begin, end, busy in (
            ("loop", "wait for groups", 0, 1, 1.0),
            ("loop", "step", 1, 2, 1.0),
            ("engine", "generate", 0, 2, 1.0),
            ("environment sort", "evaluate", 0.5, 0.75, 0.25),
            ("trainer", "step", 1, 2, 1.0),
            ("trainer", "step: forward", 1, 1.5, 0.5),
            ("sync", "update weights", 1.9, 2, 0.1),
        ):
            lines.append({"step": step, "lane": lane, "what": what, "begin": now + begin, "end": now + end,
                          "busy": busy})  # fmt: skip
        now += 2
    return lines


def test_a_lane_is_drawn_as_the_share_of_the_time_in_which_it_was_busy():
    whole, *_ = views(lanes.spans(rows(100)))
    busy = {lane.name: lane.busy for lane in whole.lanes}
    assert whole.title == "The whole run, 3 min 20 s", "without its start"
    assert busy == {
        "engine": "50% busy",
        "environment sort": "12% busy",
        "loop": "50% busy",
        "trainer": "50% busy",
        "sync": "5% busy",
    }
    assert [*busy] == ["engine", "environment sort", "loop", "trainer", "sync"]


def test_labels_of_steps_do_not_overlap_in_the_narrowest_view():
    marks = lanes._apart((position, str(1000 + position)) for position in range(0, 100, 7))
    placed = [(position, text) for position, text in marks if text]
    assert placed[0] == (0, "step 1000")
    assert len(placed) > 5
    ends = [position + lanes.CHARACTER * (len(text) + 1) for position, text in placed]
    assert all(end <= begin for end, (begin, _) in zip(ends, placed[1:], strict=False))
    assert ends[-1] <= 100 + lanes.CHARACTER


def test_some_steps_are_shown_span_by_span():
    _, newest, slowest = views(lanes.spans(rows(100)))
    assert newest.title == "Newest steps, 97 to 100, 8 s"
    assert slowest.title == "Slowest step, 1, among 1 to 4, 8 s"
    assert [text for _, text in newest.marks] == ["step 97", "98", "99", "100"]
    (loop,) = (lane for lane in newest.lanes if lane.name == "loop")
    kinds = [(kind, x, width, high) for kind, x, width, high, _ in loop.spans]
    assert kinds[:3] == [("wait", 0, 125, lanes.THIN), ("training", 125, 125, lanes.HEIGHT),
                         ("wait", 250, 125, lanes.THIN)]  # fmt: skip
    assert loop.spans[1][4] == "step: 1 s, step 97"
    assert "trainer, parts of steps" in [lane.name for lane in newest.lanes]


def test_the_slowest_step_has_a_view():
    lines = rows(40)
    for line in lines:
        if line["step"] == 20 and line["lane"] == "loop" and line["what"] == "step":
            line["end"] += 9
    assert "Slowest step, 20, among 19 to 22" in [
        one.title.rsplit(", ", 1)[0] for one in views(lanes.spans(lines))
    ]


def test_a_short_run_is_shown_span_by_span_only():
    (only,) = views(lanes.spans(rows(3)))
    assert only.title == "Steps 1 to 3, 6 s"
    assert views(lanes.spans(rows(0))) == []


def test_the_time_between_two_starts_is_left_out():
    whole, *_ = views(lanes.spans([*rows(50), *rows(50, start=90_000.0, first=51)]))
    assert whole.title == "The whole run, 3 min 20 s"
    assert {lane.name: lane.busy for lane in whole.lanes}["loop"] == "50% busy"


def test_the_stages_of_the_loop_have_their_shares(page):
    assert "The loop spent 50% in <i>wait for groups</i>, 50% in <i>step</i>." in page.read_text()


@given(
    st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e3)), min_size=1, max_size=20), st.floats(-1e6, 2e6)
)
def test_the_clock_counts_each_second_of_the_run_once(found, time):
    clock = Clock.of([span("loop", "step", begin, begin + length) for begin, length in found])
    union, last = 0.0, -1.0
    for begin, length in sorted(found):
        union += max(0.0, begin + length - max(last, begin))
        last = max(last, begin + length)
    assert clock.seconds == pytest.approx(union, abs=0.01 * len(found) + 1e-6 * union)
    assert 0 <= clock.at(time) <= clock.seconds
    assert clock.at(time) <= clock.at(time + 1)


@pytest.mark.parametrize(
    "line",
    [{}, {"step": 1, "lane": 3, "what": "x", "begin": 1, "end": 2, "busy": 1}, {"begin": "x"},
     {"step": 1, "lane": "loop", "what": "step", "begin": 1, "end": None, "busy": 1}],
)  # fmt: skip
def test_lines_that_are_not_spans_are_left_out(line):
    assert lanes.spans([line]) == []


@pytest.fixture
def page(tmp_path):
    (tmp_path / "config.toml").touch()
    hostile = {"step": 2, "lane": "<script>window.hurt=1</script>", "what": "<b>",
               "begin": 1051.0, "end": 1052.0, "busy": 1.0}  # fmt: skip
    text = "".join(json.dumps(row) + "\n" for row in [*rows(12), hostile])
    (tmp_path / "timeline.jsonl").write_text(text)
    return report.write(tmp_path)


def test_the_report_shows_it(page):
    html = page.read_text()
    assert "The loop spent 50% in <i>wait for groups</i>, 50% in <i>step</i>." in html
    assert html.count('aria-label="engine, 50% busy"') == 3
    assert "window.hurt" in html
    assert "<script>window.hurt" not in html
    drawn = re.findall(r'<rect class="(\w+)"', html)
    assert set(drawn) == {"generation", "environments", "training", "sync", "wait", "other", "chosen"}


@pytest.mark.long
@pytest.mark.skipif(bool(webdriver.absent()), reason=webdriver.absent())
def test_a_browser_draws_the_lanes_in_the_width_that_there_is(page):
    with webdriver.browser() as browser:
        for width in (1280, 420):
            browser.narrow(width)
            browser.open(f"file://{page}")
            shown = browser.run(
                "return [...document.querySelectorAll('.timeline details[open] .lane svg')]"
                ".map(one => one.getBoundingClientRect().width)"
            )
            assert len(shown) == 12
            assert all(width / 2 < each < width for each in shown)
            assert browser.run("return window.hurt") is None
        assert browser.said() == []
