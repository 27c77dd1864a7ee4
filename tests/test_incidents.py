"""Components report faults that were survived, and their run receives the reports as events."""

import asyncio
import json
import re
from collections import Counter
from typing import get_args

import pytest
from logged import Logged
from recording import tracked
from test_docs import ROOT
from test_pipeline import Run

from grpo_core.contracts.errors import EngineError, Fault
from grpo_core.contracts.events import IncidentKind, IncidentReported, PromptSkipped, RunEnded, StepEnded
from grpo_core.contracts.incidents import (
    EVERY,
    WORDS,
    IncidentCounts,
    by_kind,
    line_of,
    report,
    reported_as,
    reported_to,
)
from grpo_core.contracts.protocols import Tracker
from grpo_core.contracts.records import Judgement
from grpo_core.reporting.files import plain
from grpo_core.reporting.trackers import Trackers
from grpo_core.testing import FakeEngine, FakeEnvironment, run


def test_without_a_run_a_report_is_logged():
    with Logged() as log:
        report("died", "engine 0", "it ended with exit code 9")
    assert "engine 0: it ended with exit code 9" in log.text


def test_each_run_receives_the_reports_of_its_own_tasks():
    async def component(name):
        await asyncio.sleep(1)
        report("died", name, "it is started again")

    async def one_run(name):
        incidents = []
        with reported_to(incidents.append):
            task = asyncio.create_task(component(name))
        await task
        return [incident.component for incident in incidents]

    async def story():
        return await asyncio.gather(one_run("a"), one_run("b"))

    assert run(story()) == [["a"], ["b"]]


def test_trackers_receive_an_incident_as_an_event():
    heard = Heard()

    async def story():
        trackers = Trackers()
        trackers.add({"heard": heard})
        with reported_to(trackers.incidents.receive):
            report(
                "batch_failed",
                "environment of task 'sort'",
                "a batch of 8 failed",
                fault=Fault("ValueError", "b", "Traceback"),
            )
        await trackers.close()

    asyncio.run(story())
    (event,) = heard.events
    assert isinstance(event, IncidentReported)
    assert (event.kind, event.component) == ("batch_failed", "environment of task 'sort'")
    assert event.fault.traceback == "Traceback"


class Heard(Tracker):
    """Remembers the events of a run."""

    def __init__(self):
        self.events = []

    def event(self, event):
        self.events.append(event)

    @property
    def incidents(self):
        return [event for event in self.events if isinstance(event, IncidentReported)]


# ---------------------------------------------------------------------------------- counting and merging


def test_thousands_of_incidents_in_a_step_are_two_events_and_one_number():
    heard, metrics = Heard(), []

    def story(trackers):
        with reported_to(trackers.incidents.receive):
            for step in (1, 2):
                for i in range(3_000):
                    report("retried", "engine 0", f"call {i}")
                report("died", "engine 0", "x" * 5_000, fault=Fault("E", "z" * 9_000, "y" * 50_000 + "end"))
                metrics.append(trackers.incidents.read())
                trackers.emit(StepEnded(step=step, metrics={}))

    tracked({"heard": heard}, story)
    told = [(event.step, event.kind, event.count) for event in heard.incidents]
    assert told == [
        (step, kind, count)
        for step in (0, 1)
        for kind, count in (("retried", 1), ("died", 1), ("retried", 2_999))
    ]
    assert heard.incidents[2].message == "call 2999"
    assert metrics == [{"incidents/died": 1.0, "incidents/retried": 3_000.0}] * 2
    died = heard.incidents[1]
    assert 2_000 < len(died.message) < 2_100, "it loses its middle"
    assert len(died.fault.message) < 2_100
    assert len(died.fault.traceback) < 20_100
    assert died.fault.traceback.endswith("end")
    assert len(json.dumps([plain(event) for event in heard.incidents])) < 50_000


def test_incidents_are_reported_again_after_some_seconds():
    now, told = [0.0], []
    counts = IncidentCounts(lambda event: told.append((now[0], event.message, event.count)), lambda: now[0])
    with reported_to(counts.receive):
        for i in range(3 * int(EVERY) + 1):
            now[0] = float(i)
            report("retried", "engine 0", f"at {i}")
            if i == 170:
                report("died", "engine 0", "another cause")
        report("died", "engine 0", "again")
    assert [each for each in told if "at" in each[1]] == [
        (0.0, "at 0", 1), (60.0, "at 60", 60), (120.0, "at 120", 60), (180.0, "at 180", 60)
    ]  # fmt: skip
    assert counts.read() == {"incidents/retried": 181.0, "incidents/died": 2.0}
    assert told[-1] == (180.0, "again", 1), "the end of a step tells what is left"
    assert counts.read() == {}


def test_what_is_held_back_is_reported_before_the_run_ends():
    heard = Heard()

    def story(trackers):
        with reported_to(trackers.incidents.receive):
            for _ in range(5):
                report("died", "engine 0", "it is started again")
        trackers.emit(RunEnded(reason="failed"))

    tracked({"heard": heard}, story)
    assert [type(event) for event in heard.events] == [IncidentReported, IncidentReported, RunEnded]
    assert [event.count for event in heard.incidents] == [1, 4]


def test_a_member_reports_under_its_own_name():
    incidents = []
    with reported_to(incidents.append):
        with reported_as("engine 3"):
            report("died", "engine local", "it is started again")
        report("died", "engine local", "it is started again")
    assert [incident.component for incident in incidents] == ["engine 3", "engine local"]


def test_the_page_about_reliability_explains_every_kind():
    page = (ROOT / "docs" / "reliability.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", page, re.M) == list(get_args(IncidentKind))


# ---------------------------------------------------------------------------------- lines for people


def test_a_line_is_one_line_whatever_the_message_is():
    said = "it died; the end of its log:\n    " + "word " * 1_000
    text = line_of(IncidentReported(kind="died", component="engine 0", message=said, count=3))
    assert "\n" not in text
    assert text.startswith("engine 0: it died; the end of its log: word word")
    assert text.endswith("(3 times)")
    assert len(text) < 330
    short = IncidentReported(kind="died", component="engine 0", message="busy")
    assert line_of(short) == "engine 0: busy"


def test_numbers_of_incidents_are_listed_the_most_frequent_first():
    counts = {"died": 1.0, "retried": 12.0, "batch_failed": 1.0}
    assert by_kind(counts) == "12 repeated calls, 1 call that passed in parts, 1 dead process"


def test_every_kind_of_incident_has_a_name_for_people():
    assert WORDS.keys() == set(get_args(IncidentKind))


# ---------------------------------------------------------------------------------- what the pipeline reports


def faulty(engine=None, feedback=None, **changes):
    """A run of the real pipeline with faults; returns it with its incidents."""
    events = []
    counts = IncidentCounts(events.append, lambda: 0.0)
    environment = FakeEnvironment(feedback) if feedback else None
    done = Run(engine=engine, environment=environment, readings=counts.read, **changes)
    with reported_to(counts.receive):
        done()
    counts.flush()
    return done, events


def first_time(fault):
    left = {"0"}

    def of(number):
        if number in left:
            left.discard(number)
            return fault
        return None

    return of


def late():
    fault = first_time(True)
    return FakeEngine(latency=lambda rng: 1e6 if fault("0") else 0.5), None


def lost_by_the_engine():
    first = set()
    """The seeds of the first attempt: a request is made once more, alone, before its rollout is lost."""

    def fault(request):
        if request.group == "0" and len(first) < 4:
            first.add(request.seed)
        return EngineError("engine: its process died") if request.seed in first else None

    return FakeEngine(fault=fault), None


def without(**feedback):
    fault = first_time(Judgement(**feedback))
    return None, lambda episode: fault(episode.group) or Judgement(reward=float(episode.reply == "a"))


CAUSES = {
    "rollouts_late": (
        late(),
        "4 of 4 rollouts of prompt '0' are played again: not finished within its deadline",
    ),
    "rollouts_lost": (
        lost_by_the_engine(),
        "4 of 4 rollouts of prompt '0' are played again: engine: its process",
    ),
    "rollouts_orphaned": (
        without(error="its session ended", lost=True),
        "1 of 4 rollouts of prompt '0' are played",
    ),
    "unscored": (
        without(error="KeyError: 'gold'"),
        "1 of 4 rollouts of prompt '0' are played again: KeyError",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", CAUSES)
def test_rollouts_that_are_played_again_are_one_incident_for_each_attempt_of_a_group(kind):
    (engine, feedback), message = CAUSES[kind]
    done, events = faulty(engine, feedback)
    (incident,) = events
    assert (incident.kind, incident.component, incident.count) == (kind, "rollouts of task 'task'", 1)
    assert incident.message.startswith(message)
    assert len(done.trained) == 48
    metrics = [event.metrics for event in done.of(StepEnded)]
    assert sum(step.get(f"incidents/{kind}", 0) for step in metrics) == 1
    assert sum(name.startswith("incidents/") for step in metrics for name in step) == 1, (
        "absent without incidents"
    )


def test_a_skipped_prompt_is_an_incident_after_those_of_its_attempts():
    def feedback(episode):
        if episode.prompt.id == "2":
            return Judgement(error="ValueError: bad row")
        return Judgement(reward=1.0 if episode.reply == "a" else 0.0)

    done, events = faulty(None, feedback, max_retries=2)
    assert len(done.of(PromptSkipped)) == 1
    total = Counter()
    for incident in events:
        total[incident.kind] += incident.count
    assert total == {"unscored": 2, "skipped": 1}
    (skip,) = [incident for incident in events if incident.kind == "skipped"]
    assert skip.message == "prompt '2' is skipped after 3 attempts: ValueError: bad row"
