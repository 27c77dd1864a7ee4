"""Components report faults that were survived, and their run receives the reports as events."""

import asyncio
import logging

from grpo_core.events import IncidentReported
from grpo_core.incidents import report, reported_to
from grpo_core.protocols import Tracker
from grpo_core.reporting.trackers import Trackers
from grpo_core.testing import run


def test_without_a_run_a_report_is_logged(caplog):
    with caplog.at_level(logging.WARNING):
        report("died", "engine 0", "it ended with exit code 9")
    assert "engine 0: it ended with exit code 9" in caplog.text


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
    class Heard(Tracker):
        def __init__(self):
            self.events = []

        def event(self, event):
            self.events.append(event)

    heard = Heard()

    async def story():
        trackers = Trackers({"heard": heard})
        with reported_to(trackers.report):
            report("batch_failed", "environment of task 'sort'", "a batch of 8 failed", traceback="Traceback")
        await trackers.close()

    asyncio.run(story())
    (event,) = heard.events
    assert isinstance(event, IncidentReported)
    assert (event.kind, event.component) == ("batch_failed", "environment of task 'sort'")
    assert event.traceback == "Traceback"
